"""Pages by torch.distributed, point to point: the sending half. Control goes over gRPC (`KvCollective`).

Life of a pair (one decode incarnation; at most `max_groups`):

    1. first open   Join on a stream, then both sides build the group. A failure is remembered for REJOIN_S, so that
                    shipments take the next transport at once instead of waiting for the same failure
    2. push         each offer, in the order of the pair's FIFO: pages copied to staging, Offer -> Ready, the bytes,
                    Done -> Received. A refused offer ends its shipment only
    3. broken       an operation over its time or a broken stream: everyone in the FIFO fails, the group is gone, the
                    next open makes a new generation
    4. closed       unused for `idle_group_s`, its worker lives another life, or `close`

An offer runs in a task of the pair, not of the caller: a cancelled push leaves as soon as its pages are copied or
its turn has not come, and the FIFO stays in step. The gRPC channel outlives a broken group until its shipments
end, because commits need no group.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import TransferStats
from twostroke.cluster.transport.collective_group import PREFILL_RANK, PairGroup, PairThread, device_pages
from twostroke.cluster.transport.control import EOF, failed, send_abort, send_commit, writer_of
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.convert import layout_to_wire
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

log = structlog.get_logger(__name__)

REJOIN_S = 30.0
REMEMBERED_FAILURES = 256
CLOSE_S = 2.0

Key = tuple[str, Incarnation]
Failure: TypeAlias = TransferFailed | LayoutMismatch


@dataclass(slots=True)
class _Offer:
    lease: Lease
    first: int
    pages: Sequence[PageId]
    abandoned: bool = False
    reading: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """The pool is not read any more."""


class CollectiveTransport:
    """Implements `base.Transport`."""

    name = "collective"

    def __init__(
        self,
        memory: PageMemory,
        incarnation: Incarnation,
        *,
        host: str,
        device: str = "cpu",
        offer_bytes: int = 16 << 20,
        operation_timeout_s: float = 10.0,
        idle_group_s: float = 300.0,
        max_groups: int = 16,
    ) -> None:
        """`host` is our own, where gloo listens; `device` as in WorkerInfo."""
        self.memory = memory
        self.incarnation = incarnation
        self.host = host
        self.device = device if device_pages(memory) is not None else "cpu"
        self.pages_per_offer = max(1, offer_bytes // memory.layout.page_bytes)
        self.timeout_s = operation_timeout_s
        self.tasks = TaskOwner("collective")
        self._idle_group_s = idle_group_s
        self._max_groups = max_groups
        self.unclosed: set[_Pair] = set()
        """Pairs with an open channel, broken ones too."""
        self._pairs: dict[Key, _Pair] = {}
        self._failures: dict[Key, tuple[float, str]] = {}
        self._threads: set[PairThread] = set()

    @property
    def num_groups(self) -> int:
        return len(self._pairs)

    async def open(self, lease: Lease) -> "CollectiveShipment":
        check_compatible(self.memory.layout, lease.layout)
        key = (lease.shards[0].address, lease.incarnation)
        pair = self._pairs.get(key)
        if pair is None or pair.broken:
            pair = self._new_pair(key)
        pair.acquire()
        try:
            await pair.join(lease)
        except BaseException:
            pair.release()
            raise
        return CollectiveShipment(self, lease, pair)

    def _new_pair(self, key: Key) -> "_Pair":
        for other in list(self._pairs):
            if other == key or other[0] == key[0]:
                self._pairs[other].break_up("another life of the worker, or of the pair, began")
        failed_at_s, reason = self._failures.get(key, (float("-inf"), ""))
        if time.monotonic() - failed_at_s < REJOIN_S:
            raise TransferFailed(reason)
        if len(self._pairs) >= self._max_groups:
            raise TransferFailed(f"{len(self._pairs)} groups already, as many as max_groups allows")
        pair = self._pairs[key] = _Pair(self, key, self._idle_group_s)
        return pair

    def new_thread(self, key: Key) -> PairThread:
        thread = PairThread(f"collective.{key[1]}")
        self._threads = {thread for thread in self._threads if thread.alive} | {thread}
        return thread

    def not_joined(self, key: Key, reason: str) -> None:
        self._failures[key] = (time.monotonic(), reason)
        if len(self._failures) > REMEMBERED_FAILURES:
            del self._failures[next(iter(self._failures))]

    def forget(self, key: Key, pair: "_Pair") -> None:
        if self._pairs.get(key) is pair:
            del self._pairs[key]

    async def close(self) -> None:
        for pair in list(self._pairs.values()):
            pair.break_up("the worker stops")
        for pair in list(self.unclosed):
            await pair.close_channel()
        await self.tasks.close()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if not await thread.wait_ended(max(0.0, deadline_s - time.monotonic())):
                log.warning("group_still_waits", reason="its peer is frozen; the thread ends with its operation")


class _Pair:
    """One generation: channel, stream, group, thread and FIFO."""

    def __init__(self, owner: CollectiveTransport, key: Key, idle_group_s: float) -> None:
        self.broken = ""
        self.channel_closed = False
        self._owner = owner
        self._key = key
        self._idle_group_s = idle_group_s
        self._channel = open_channel(key[0])
        owner.unclosed.add(self)
        self.stub = kv_transfer_pb2_grpc.KvTransferStub(self._channel)  # type: ignore[no-untyped-call]
        collective = kv_transfer_pb2_grpc.KvCollectiveStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream: grpc.aio.StreamStreamCall[Any, Any] = collective.Pair()
        self._stream.add_done_callback(lambda _: self.break_up("the stream ended"))
        self._thread = owner.new_thread(key)
        self._group: PairGroup | None = None
        self._joining: asyncio.Task[Failure | None] | None = None
        self._fifo = asyncio.Lock()
        self._seq = 0
        self._num_open = 0
        self._idle: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------- life

    def acquire(self) -> None:
        self._num_open += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def release(self) -> None:
        """A shipment is over."""
        self._num_open -= 1
        if self._num_open:
            return
        if self.broken:
            self._close_channel()
        else:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_group_s, self.break_up, "unused")

    def break_up(self, reason: str) -> None:
        """End this generation. Idempotent; shipments that are open may still commit."""
        if self.broken:
            return
        self.broken = reason
        log.info("pair_ended", theirs=self._key[1], reason=reason)
        self._owner.forget(self._key, self)
        if self._idle is not None:
            self._idle.cancel()
        self._stream.cancel()
        group = self._group
        self._thread.stop(group.close if group is not None else lambda: None)
        if not self._num_open:
            self._close_channel()

    def _close_channel(self) -> None:
        self.channel_closed = True
        self._owner.tasks.spawn(self.close_channel(), f"close.{self._key[1]}")

    async def close_channel(self) -> None:
        """Ends what is still under way on it. Idempotent."""
        self.channel_closed = True
        await self._channel.close(grace=None)
        self._owner.unclosed.discard(self)

    # ------------------------------------------------------------------------------------------- join

    async def join(self, lease: Lease) -> None:
        """Returns once the group stands. Raises LayoutMismatch or TransferFailed to everyone who waits for it."""
        if self._joining is None:
            self._joining = self._owner.tasks.spawn(self._join(lease), f"join.{self._key[1]}")
        error = await _outcome(self._joining)
        if error is not None:
            raise _fresh(error)

    async def _join(self, lease: Lease) -> Failure | None:
        error: Failure
        try:
            async with asyncio.timeout(self._owner.timeout_s):
                await self._meet()
            return None
        except grpc.aio.AioRpcError as broken:
            error = failed("join", lease, broken)
        except TimeoutError:
            error = TransferFailed(f"join to {lease.worker_id}: not within {self._owner.timeout_s} s")
        except TransferFailed as broken:
            error = TransferFailed(f"join to {lease.worker_id}: {broken.message}")
        if isinstance(error, TransferFailed):
            self._owner.not_joined(self._key, error.message)
        self.break_up(error.message)
        return error

    async def _meet(self) -> None:
        owner = self._owner
        staging_bytes = owner.pages_per_offer * owner.memory.layout.page_bytes
        join = pb.PairJoin(
            sender=owner.incarnation,
            incarnation=self._key[1],
            layout=layout_to_wire(owner.memory.layout),
            device=owner.device,
            offer_bytes=staging_bytes,
        )
        joined = (await self._ask(pb.PairRequest(join=join))).joined
        self._group = PairGroup(
            owner.memory,
            name=joined.group,
            rank=PREFILL_RANK,
            backend=joined.backend,
            host=owner.host,
            staging_bytes=staging_bytes,
            timeout_s=owner.timeout_s,
        )
        host = self._key[0].rpartition(":")[0].strip("[]")
        await self._thread.run(self._group.connect, (host, joined.store_port))
        log.info("pair_made", ours=owner.incarnation, theirs=self._key[1], backend=joined.backend)

    # ------------------------------------------------------------------------------------------ offers

    async def ship(self, lease: Lease, first: int, pages: Sequence[PageId]) -> None:
        """One offer. Raises TransferFailed. Cancelled, it has let go of the pages when the cancellation comes out."""
        offer = _Offer(lease, first, pages)
        task = self._owner.tasks.spawn(self._ship(offer), f"offer.{lease.lease_id}")
        try:
            error = await _outcome(task)
        except asyncio.CancelledError:
            offer.abandoned = True
            if offer.reading:
                await offer.let_go.wait()
            raise
        if error is not None:
            raise _fresh(error)

    async def _ship(self, offer: _Offer) -> TransferFailed | None:
        async with self._fifo:
            if self.broken or offer.abandoned:
                return TransferFailed(self.broken or "cancelled")
            timeout_s = self._owner.timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._exchange(offer, time.monotonic() + timeout_s)
            except TimeoutError:
                error = TransferFailed(f"push to {offer.lease.worker_id}: not within {timeout_s} s")
            except grpc.aio.AioRpcError as broken:
                error = TransferFailed(f"push to {offer.lease.worker_id}: {broken.code().name}: {broken.details()}")
            except TransferFailed as broken:
                error = TransferFailed(f"push to {offer.lease.worker_id}: {broken.message}")
            self.break_up(error.message)
            return error

    async def _exchange(self, offer: _Offer, deadline_s: float) -> TransferFailed | None:
        """Returns a refusal, which leaves the pair in step; raises what breaks it."""
        assert self._group is not None
        offer.reading = True
        try:
            await self._thread.finish(self._group.stage, offer.pages)
        finally:
            offer.let_go.set()
        self._seq += 1
        count = len(offer.pages)
        announced = pb.PairOffer(seq=self._seq, writer=writer_of(offer.lease), first=offer.first, count=count)
        reply = await self._ask(pb.PairRequest(offer=announced))
        if reply.WhichOneof("kind") == "refused":
            return self._refused(offer, reply.refused)
        self._in_step(reply.ready.seq)
        sums = await self._thread.run(self._group.send, count, deadline_s)
        reply = await self._ask(pb.PairRequest(done=pb.PairDone(seq=self._seq, checksums=sums)))
        if reply.WhichOneof("kind") == "refused":
            return self._refused(offer, reply.refused)
        self._in_step(reply.received.seq)
        return None

    def _refused(self, offer: _Offer, refused: pb.PairRefused) -> TransferFailed:
        self._in_step(refused.seq)
        return TransferFailed(f"push to {offer.lease.worker_id}: {refused.reason}")

    def _in_step(self, seq: int) -> None:
        if seq != self._seq:
            raise TransferFailed(f"the answer is to offer {seq}, not {self._seq}")

    async def _ask(self, request: pb.PairRequest) -> pb.PairReply:
        try:
            await self._stream.write(request)
            reply = await self._stream.read()
        except asyncio.InvalidStateError:  # the stream ended before: its status says why
            reply = EOF
        except asyncio.CancelledError:
            # grpc says the same when we are cancelled and when the stream was, by `break_up`.
            if _is_cancelled():
                raise
            raise TransferFailed(self.broken or "the stream was cancelled") from None
        if reply is EOF:
            raise TransferFailed(f"the stream ended: {await self._stream.details()}")
        assert isinstance(reply, pb.PairReply)
        return reply


class CollectiveShipment:
    """Implements `base.Shipment`."""

    def __init__(self, transport: CollectiveTransport, lease: Lease, pair: _Pair) -> None:
        """The pair is acquired for us."""
        self._transport = transport
        self._lease = lease
        self._pair = pair
        self._num_pages = 0
        self._busy_s = 0.0
        self._over = False
        self._told = False
        """The other side knows, or has been told, that nothing more comes."""

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        self._check_live()
        at_once = self._transport.pages_per_offer
        started_s = time.monotonic()
        try:
            for start in range(0, len(pages), at_once):
                some = pages[start : start + at_once]
                await self._pair.ship(self._lease, first + start, some)
                self._num_pages += len(some)
        except TransferFailed:
            self._end()
            raise
        finally:
            self._busy_s += time.monotonic() - started_s

    async def commit(self, first_token: int, first_token_index: int) -> TransferStats:
        self._check_live()
        try:
            await send_commit(self._pair.stub, self._lease, first_token, first_token_index, self._transport.timeout_s)
        finally:
            self._told = True
            self._end()
        num_bytes = self._num_pages * self._transport.memory.layout.page_bytes
        return TransferStats("collective", self._num_pages, num_bytes, self._busy_s)

    async def abort(self, reason: str) -> None:
        if self._told or self._pair.channel_closed:
            self._end()
            return
        self._told = True
        self._pair.acquire()
        self._end()
        try:
            await send_abort(self._pair.stub, self._lease, reason)
        finally:
            self._pair.release()

    def _check_live(self) -> None:
        if self._over:
            raise TransferFailed(f"lease {self._lease.lease_id}: the shipment is over")

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._pair.release()


def _fresh(error: Failure) -> Failure:
    """An equal error to raise: one that is kept, or raised to several, would keep all their frames alive."""
    if isinstance(error, LayoutMismatch):
        return LayoutMismatch(error.field, error.ours, error.theirs)
    return TransferFailed(error.message)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _outcome(task: "asyncio.Task[Failure | None]") -> Failure | None:
    """What a pair's task returned; the task goes on when its caller is cancelled."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        return TransferFailed("the transport is closed")
