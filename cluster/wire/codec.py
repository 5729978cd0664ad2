"""The stateful half of the attached stream's format: job handles, and items cut into frames.

    handles    Submit binds a small integer to its job; every later message about the job carries the integer;
               the Refused or Ended that answers the Submit frees it. Both ends count alike: every Submit is
               answered exactly once, and a job that is submitted again before its answer keeps its handle.
    frames     items queue in an `Outbox`, bounded in bytes; each write takes as many as fit into one frame. An
               item larger than a frame is sent as consecutive fragments, put together by `Assembly`.

A message about a job without a handle is dropped and counted (`dropped`): its job has ended on this stream.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from twostroke.cluster.core.ids import JobId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Cancel,
    Leased,
    LoadReport,
    PromptLogprobs,
    Refused,
    RenewLease,
    RouterMessage,
    Started,
    Submit,
    TokenRun,
    Tokens,
    WorkerMessage,
)
from twostroke.cluster.wire.convert import WireError, lease_from_wire, lease_to_wire
from twostroke.cluster.wire.logprobs import first_logprob_from_wire, logprobs_from_wire, logprobs_to_wire
from twostroke.cluster.wire.messages import (
    ended_from_wire,
    ended_to_wire,
    load_from_wire,
    load_to_wire,
    refusal_from_wire,
    refusal_to_wire,
    submit_from_wire,
    submit_to_wire,
)
from twostroke.proto.v1 import worker_pb2 as pb

FRAME_BYTES = 960 << 10
"""Most bytes of items in one frame; the frame itself stays under 1 MiB."""
ASSEMBLY_BYTES = 32 << 20
"""Largest item that is put together from fragments."""


class Handles:
    """Which job an integer means on one stream."""

    def __init__(self) -> None:
        self._by_job: dict[JobId, int] = {}
        self._by_handle: dict[int, tuple[JobId, int]] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_handle)

    def draw(self, job: JobId) -> int:
        """The handle to bind to `job`: the one it has, or an unused one."""
        handle = self._by_job.get(job)
        if handle is None:
            handle = self._next
            self._next += 1
        return handle

    def bind(self, job: JobId, handle: int) -> None:
        """One more Submit of `job` awaits its answer. Raises WireError when the handle means another job."""
        bound, count = self._by_handle.get(handle, (job, 0))
        if bound != job or self._by_job.get(job, handle) != handle:
            raise WireError(f"handle {handle} already means job {bound}, not {job}")
        self._by_job[job] = handle
        self._by_handle[handle] = (job, count + 1)

    def free(self, handle: int) -> None:
        """One Submit of the handle's job has been answered."""
        job, count = self._by_handle[handle]
        if count > 1:
            self._by_handle[handle] = (job, count - 1)
            return
        del self._by_handle[handle]
        del self._by_job[job]

    def of(self, job: JobId) -> int | None:
        return self._by_job.get(job)

    def job(self, handle: int) -> JobId | None:
        bound = self._by_handle.get(handle)
        return None if bound is None else bound[0]


class RouterCodec:
    """The router's end of one stream."""

    def __init__(self) -> None:
        self.handles = Handles()
        self.dropped = 0

    def encode(self, message: RouterMessage) -> pb.RouterItem | None:
        """None when the job has ended on this stream, so that there is nothing to say."""
        if isinstance(message, Submit):
            handle = self.handles.draw(message.job)
            item = pb.RouterItem(submit=submit_to_wire(message, handle))
            self.handles.bind(message.job, handle)
            return item
        known = self.handles.of(message.job)
        if known is None:
            self.dropped += 1
            return None
        if isinstance(message, Cancel):
            return pb.RouterItem(cancel=pb.Cancel(handle=known))
        return pb.RouterItem(renew_lease=pb.RenewLease(handle=known, bump_epoch=message.bump_epoch))

    def decode(self, item: pb.WorkerItem) -> WorkerMessage | None:
        """None for a job that is not known (any more). Raises WireError for what no peer sends."""
        kind = item.WhichOneof("message")
        if kind == "tokens":
            return self._decode_tokens(item.tokens)
        if kind == "load":
            return load_from_wire(item.load)
        if kind is None:
            self.dropped += 1
            return None
        handle = getattr(item, kind).handle
        job = self.handles.job(handle)
        if job is None:
            self.dropped += 1
            return None
        if kind == "leased":
            return Leased(job, lease_from_wire(item.leased.lease))
        if kind == "started":
            started = item.started
            first_token = started.first_token if started.HasField("first_token") else None
            return Started(job, started.cached_tokens, first_token, first_logprob_from_wire(started))
        if kind == "prompt_logprobs":
            prompt = item.prompt_logprobs
            return PromptLogprobs(job, prompt.first, logprobs_from_wire(prompt.logprobs))
        if kind == "refused":
            self.handles.free(handle)
            return Refused(job, refusal_from_wire(item.refused.reason), item.refused.message)
        self.handles.free(handle)
        return ended_from_wire(item.ended, job)

    def _decode_tokens(self, block: pb.Tokens) -> Tokens:
        tokens = tuple(block.tokens)
        runs: list[TokenRun] = []
        start = 0
        job_of = self.handles.job
        for handle, first, count in zip(block.handle, block.first_index, block.count, strict=True):
            end = start + count
            job = job_of(handle)
            if job is None:
                self.dropped += 1
            else:
                runs.append(TokenRun(job, first, tokens[start:end]))
            start = end
        if start != len(tokens):
            raise WireError(f"runs cover {start} of {len(tokens)} tokens")
        if block.with_logprobs:
            _give_logprobs(block, runs, self.handles)
        return Tokens(tuple(runs))


def _give_logprobs(block: pb.Tokens, runs: list[TokenRun], handles: Handles) -> None:
    """Put the log-probabilities of `block` into its `runs`, which lack those of unknown jobs."""
    places = {(run.job, run.first_index): place for place, run in enumerate(runs)}
    values = logprobs_from_wire(block.logprobs)
    start = 0
    for index in block.with_logprobs:
        if index >= len(block.handle):
            raise WireError(f"log-probabilities of run {index} of {len(block.handle)}")
        end = start + block.count[index]
        job = handles.job(block.handle[index])
        if job is not None:
            place = places[job, block.first_index[index]]
            runs[place] = runs[place]._replace(logprobs=values[start:end])
        start = end
    if start != len(values):
        raise WireError(f"runs cover {start} of {len(values)} log-probabilities")


class WorkerCodec:
    """The worker's end of one stream."""

    def __init__(self) -> None:
        self.handles = Handles()
        self.dropped = 0

    def decode(self, item: pb.RouterItem) -> RouterMessage | None:
        """None for a job that is not known (any more). Raises WireError for what no peer sends."""
        kind = item.WhichOneof("message")
        if kind == "submit":
            submit = submit_from_wire(item.submit)
            self.handles.bind(submit.job, item.submit.handle)
            return submit
        job = None if kind is None else self.handles.job(getattr(item, kind).handle)
        if job is None:
            self.dropped += 1
            return None
        if kind == "cancel":
            return Cancel(job)
        return RenewLease(job, item.renew_lease.bump_epoch)

    def encode(self, message: WorkerMessage) -> pb.WorkerItem | None:
        """None when the job was not submitted on this stream, or its answer has been sent."""
        if isinstance(message, Tokens):
            return self._encode_tokens(message)
        if isinstance(message, LoadReport):
            return pb.WorkerItem(load=load_to_wire(message))
        handle = self.handles.of(message.job)
        if handle is None:
            self.dropped += 1
            return None
        if isinstance(message, Leased):
            return pb.WorkerItem(leased=pb.Leased(handle=handle, lease=lease_to_wire(message.lease)))
        if isinstance(message, Started):
            started = pb.Started(handle=handle, cached_tokens=message.cached_tokens, first_token=message.first_token)
            if message.first_logprob is not None:
                started.first_logprob.CopyFrom(logprobs_to_wire([message.first_logprob]))
            return pb.WorkerItem(started=started)
        if isinstance(message, PromptLogprobs):
            run = pb.PromptRun(handle=handle, first=message.first, logprobs=logprobs_to_wire(message.logprobs))
            return pb.WorkerItem(prompt_logprobs=run)
        self.handles.free(handle)
        if isinstance(message, Refused):
            reason = refusal_to_wire(message.reason)
            return pb.WorkerItem(refused=pb.Refused(handle=handle, reason=reason, message=message.message))
        return pb.WorkerItem(ended=ended_to_wire(message, handle))

    def _encode_tokens(self, message: Tokens) -> pb.WorkerItem | None:
        handles: list[int] = []
        firsts: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        with_logprobs: list[int] = []
        logprobs: list[TokenLogprob] = []
        handle_of = self.handles.of
        for run in message.runs:
            handle = handle_of(run.job)
            if handle is None:
                self.dropped += 1
                continue
            handles.append(handle)
            firsts.append(run.first_index)
            counts.append(len(run.tokens))
            tokens.extend(run.tokens)
            if run.logprobs:
                with_logprobs.append(len(handles) - 1)
                logprobs.extend(run.logprobs)
        if not handles:
            return None
        block = pb.Tokens(handle=handles, first_index=firsts, count=counts, tokens=tokens)
        if with_logprobs:
            block.with_logprobs.extend(with_logprobs)
            block.logprobs.CopyFrom(logprobs_to_wire(logprobs))
        return pb.WorkerItem(tokens=block)


class Item(Protocol):
    """What the frame code needs of a protobuf message."""

    def ByteSize(self) -> int: ...

    def SerializeToString(self) -> bytes: ...


ItemT = TypeVar("ItemT", bound=Item)


class Outbox(Generic[ItemT]):
    """Items waiting to be written, bounded in bytes; coalesces what waits into one frame a write."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[ItemT, int]] = deque()
        self._fragments: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items) + len(self._fragments)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def put(self, item: ItemT) -> bool:
        """False when the item does not fit any more; the caller then closes the stream."""
        size = item.ByteSize()
        if self._bytes + size > self._max_bytes:
            return False
        self._items.append((item, size))
        self._bytes += size
        return True

    def take(self) -> tuple[list[ItemT], bytes, bool]:
        """The next frame's (items, fragment, fragment_end); all empty when nothing waits."""
        if not self._fragments and self._items and self._items[0][1] > FRAME_BYTES:
            data = self._items.popleft()[0].SerializeToString()
            self._fragments.extend(data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))
        if self._fragments:
            fragment = self._fragments.popleft()
            self._bytes -= len(fragment)
            return [], fragment, not self._fragments
        items: list[ItemT] = []
        size = 0
        # Each item costs up to 6 bytes of framing besides its own.
        while self._items and size + self._items[0][1] <= FRAME_BYTES:
            item, item_bytes = self._items.popleft()
            items.append(item)
            size += item_bytes + 6
            self._bytes -= item_bytes
        return items, b"", False


class Assembly(Generic[ItemT]):
    """Puts frames back into items, in order."""

    def __init__(self, parse: Callable[[bytes], ItemT]) -> None:
        self._parse = parse
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, items: Sequence[ItemT], fragment: bytes, fragment_end: bool) -> Sequence[ItemT]:
        """The items that this frame completes. Raises WireError for fragments over the limit or torn ones."""
        if not fragment:
            if self._parts and items:
                raise WireError("a frame of items between the fragments of one")
            return items
        self._parts.append(fragment)
        self._bytes += len(fragment)
        if self._bytes > ASSEMBLY_BYTES:
            raise WireError(f"an item of more than {ASSEMBLY_BYTES} bytes")
        if not fragment_end:
            return ()
        data = b"".join(self._parts)
        self._parts.clear()
        self._bytes = 0
        return (self._parse(data),)
