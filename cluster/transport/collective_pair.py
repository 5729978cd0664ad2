"""One generation of the sending side's pair: channel, stream, group, thread and FIFO. See `collective` for its life.

An offer runs in a task of the pair, not of the caller: a cancelled push leaves as soon as its pages are copied or
its turn has not come, and the FIFO stays in step. The gRPC channel outlives a broken group until its shipments
end, because commits need no group.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.collective_group import PREFILL_RANK, PairGroup, PairThread
from twostroke.cluster.transport.control import EOF, failed, writer_of
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.convert import layout_to_wire
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

log = structlog.get_logger(__name__)

SLOTS = 2
"""Offers of a pair between staging and their answer."""

Key = tuple[str, Incarnation]
Failure: TypeAlias = TransferFailed | LayoutMismatch


@dataclass(frozen=True, slots=True)
class Sender:
    """What all pairs of a prefill worker have in common. `host` and `device` are its own."""

    memory: PageMemory
    incarnation: Incarnation
    host: str
    device: str
    pages_per_offer: int
    timeout_s: float
    idle_group_s: float
    tasks: TaskOwner


class Owner(Protocol):
    """Hears of a pair's life."""

    def not_joined(self, key: Key, reason: str) -> None:
        """The group could not be made."""
        ...

    def forget(self, key: Key, pair: "Pair") -> None:
        """The pair takes no new shipments."""
        ...

    def channel_closed(self, pair: "Pair") -> None:
        """Its last shipment ended too."""
        ...


@dataclass(slots=True)
class _Offer:
    lease: Lease
    first: int
    pages: Sequence[PageId]
    abandoned: bool = False
    reading: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Either the pair's thread begins to read, or the caller has left before."""
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    """The pool is not read any more."""

    def stage(self, group: PairGroup, slot: int) -> list[int]:
        """In the pair's thread."""
        with self.lock:
            if self.abandoned:
                raise TransferFailed("cancelled")
            self.reading = True
        return group.stage(self.pages, slot)

    async def abandon(self) -> None:
        with self.lock:
            self.abandoned = True
        if self.reading:
            await self.let_go.wait()


class Pair:
    """Made by `CollectiveTransport.open`."""

    def __init__(self, sender: Sender, owner: Owner, key: Key) -> None:
        self.broken = ""
        self.channel_closed = False
        self.thread = PairThread(f"collective.{key[1]}")
        self._sender = sender
        self._owner = owner
        self._key = key
        self._channel = open_channel(key[0])
        self.stub = kv_transfer_pb2_grpc.KvTransferStub(self._channel)  # type: ignore[no-untyped-call]
        collective = kv_transfer_pb2_grpc.KvCollectiveStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream: grpc.aio.StreamStreamCall[Any, Any] = collective.Pair()
        self._stream.add_done_callback(lambda _: self.break_up("the stream ended"))
        self._group: PairGroup | None = None
        self._joining: asyncio.Task[Failure | None] | None = None
        self._fifo = asyncio.Lock()
        self._slots = list(range(SLOTS))
        self._free_slots = asyncio.Semaphore(SLOTS)
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
            self._idle = loop.call_later(self._sender.idle_group_s, self.break_up, "unused")

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
        self.thread.stop(group.close if group is not None else lambda: None)
        if not self._num_open:
            self._close_channel()

    def _close_channel(self) -> None:
        self.channel_closed = True
        self._sender.tasks.spawn(self.close_channel(), f"close.{self._key[1]}")

    async def close_channel(self) -> None:
        """Ends what is still under way on it. Idempotent."""
        self.channel_closed = True
        await self._channel.close(grace=None)
        self._owner.channel_closed(self)

    # ------------------------------------------------------------------------------------------- join

    async def join(self, lease: Lease) -> None:
        """Returns once the group stands. Raises LayoutMismatch or TransferFailed to everyone who waits for it."""
        if self._joining is None:
            self._joining = self._sender.tasks.spawn(self._join(lease), f"join.{self._key[1]}")
        error = await _outcome(self._joining)
        if error is not None:
            raise _fresh(error)

    async def _join(self, lease: Lease) -> Failure | None:
        error: Failure
        try:
            async with asyncio.timeout(self._sender.timeout_s):
                await self._meet()
            return None
        except grpc.aio.AioRpcError as broken:
            error = failed("join", lease, broken)
        except TimeoutError:
            error = TransferFailed(f"join to {lease.worker_id}: not within {self._sender.timeout_s} s")
        except TransferFailed as broken:
            error = TransferFailed(f"join to {lease.worker_id}: {broken.message}")
        if isinstance(error, TransferFailed):
            self._owner.not_joined(self._key, error.message)
        self.break_up(error.message)
        return error

    async def _meet(self) -> None:
        sender = self._sender
        staging_bytes = sender.pages_per_offer * sender.memory.layout.page_bytes
        join = pb.PairJoin(
            sender=sender.incarnation,
            incarnation=self._key[1],
            layout=layout_to_wire(sender.memory.layout),
            device=sender.device,
            offer_bytes=staging_bytes,
        )
        joined = (await self._ask(pb.PairRequest(join=join))).joined
        self._group = PairGroup(
            sender.memory,
            name=joined.group,
            rank=PREFILL_RANK,
            backend=joined.backend,
            host=sender.host,
            staging_bytes=staging_bytes,
            timeout_s=sender.timeout_s,
            slots=SLOTS,
        )
        host = self._key[0].rpartition(":")[0].strip("[]")
        await self.thread.run(self._group.connect, (host, joined.store_port))
        log.info("pair_made", ours=sender.incarnation, theirs=self._key[1], backend=joined.backend)

    # ------------------------------------------------------------------------------------------ offers

    async def ship(self, lease: Lease, first: int, pages: Sequence[PageId]) -> None:
        """One offer. Raises TransferFailed. Cancelled, it has let go of the pages when the cancellation comes out."""
        offer = _Offer(lease, first, pages)
        task = self._sender.tasks.spawn(self._ship(offer), f"offer.{lease.lease_id}")
        try:
            error = await _outcome(task)
        except asyncio.CancelledError:
            await offer.abandon()
            raise
        if error is not None:
            raise _fresh(error)

    async def _ship(self, offer: _Offer) -> TransferFailed | None:
        """Staged while an earlier offer waits for its answer, exchanged in turn."""
        async with self._free_slots:
            slot = self._slots.pop()
            try:
                return await self._ship_from(offer, slot)
            finally:
                self._slots.append(slot)

    async def _ship_from(self, offer: _Offer, slot: int) -> TransferFailed | None:
        assert self._group is not None
        try:
            sums = await self.thread.finish(offer.stage, self._group, slot)
        except TransferFailed as stopped:
            return TransferFailed(self.broken or stopped.message)
        finally:
            offer.let_go.set()
        async with self._fifo:
            if self.broken:
                return TransferFailed(self.broken)
            timeout_s = self._sender.timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._exchange(offer, slot, sums, time.monotonic() + timeout_s)
            except TimeoutError:
                error = TransferFailed(f"push to {offer.lease.worker_id}: not within {timeout_s} s")
            except grpc.aio.AioRpcError as broken:
                error = TransferFailed(f"push to {offer.lease.worker_id}: {broken.code().name}: {broken.details()}")
            except TransferFailed as broken:
                error = TransferFailed(f"push to {offer.lease.worker_id}: {broken.message}")
            self.break_up(error.message)
            return error

    async def _exchange(self, offer: _Offer, slot: int, sums: list[int], deadline_s: float) -> TransferFailed | None:
        """Returns a refusal, which leaves the pair in step; raises what breaks it."""
        assert self._group is not None
        self._seq += 1
        count = len(offer.pages)
        announced = pb.PairOffer(seq=self._seq, writer=writer_of(offer.lease), first=offer.first, count=count)
        reply = await self._ask(pb.PairRequest(offer=announced))
        if reply.WhichOneof("kind") == "refused":
            return self._refused(offer, reply.refused)
        self._in_step(reply.ready.seq)
        await self.thread.run(self._group.send, count, deadline_s, slot)
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
