"""The decode side of the collective transport.

A pair is one `Pair` stream; its group lives as long as the stream:

    1. Join      incarnation and layout compared, at most `max_groups` at once, the backend chosen; -> Joined
    2. connect   both sides build the group; failing to ends the stream
    3. Offer     the intake pins the pages (or -> Refused); -> Ready, receive into staging, Done, check, write;
                 the ticket is ended in any case; -> Received, or Refused for a damaged page
    4. end       the stream broke, the sender left, an operation ran over its time, or we close: the group is closed

Requests of a stream are served one after the other, so a pair has one order by construction.
"""

import asyncio
import time
from secrets import token_hex
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog

from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, LeaseId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.transport.base import Intake, PageWrite, WriteTicket
from twostroke.cluster.transport.collective_group import (
    DECODE_RANK,
    PairGroup,
    PairStore,
    PairThread,
    device_pages,
)
from twostroke.cluster.transport.control import EOF
from twostroke.cluster.transport.server import refuse
from twostroke.cluster.wire.convert import layout_from_wire
from twostroke.cluster.wire.status import abort_with
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

log = structlog.get_logger(__name__)

MAX_OFFER_BYTES = 64 << 20
CLOSE_S = 2.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class CollectiveServicer(kv_transfer_pb2_grpc.KvCollectiveServicer):
    """Mounted beside `add_transfer_services`, which serves commits; `close` before the server stops."""

    def __init__(
        self,
        intake: Intake,
        memory: PageMemory,
        incarnation: Incarnation,
        *,
        host: str,
        device: str = "cpu",
        operation_timeout_s: float = 10.0,
        max_groups: int = 16,
    ) -> None:
        """`host` is where store and gloo listen; `device` as in WorkerInfo."""
        self._intake = intake
        self._memory = memory
        self._incarnation = incarnation
        self._host = host
        self._device = device if device_pages(memory) is not None else "cpu"
        self._timeout_s = operation_timeout_s
        self._max_groups = max_groups
        self._store: asyncio.Task[PairStore] | None = None
        self._pairs: dict[str, asyncio.Task[Any]] = {}
        """The stream of each prefill incarnation."""
        self._threads: set[PairThread] = set()
        self._generation = 0

    @property
    def num_groups(self) -> int:
        return len(self._pairs)

    async def Pair(self, requests: object, context: Context) -> None:
        try:
            await self._pair(context)
        except LayoutMismatch as error:
            await abort_with(context, error)
        except TransferFailed as error:
            log.info("pair_refused", error=error.message)
            await refuse(context, error.message)

    async def _pair(self, context: Context) -> None:
        join = (await self._read(context)).join
        self._check(join)
        task = asyncio.current_task()
        assert task is not None
        former = self._pairs.pop(join.sender, None)
        if former is not None:
            former.cancel()
        if len(self._pairs) >= self._max_groups:
            raise TransferFailed(f"{len(self._pairs)} pairs already, as many as max_groups allows")
        self._pairs[join.sender] = task
        try:
            await self._serve(join, context)
        finally:
            if self._pairs.get(join.sender) is task:
                del self._pairs[join.sender]

    async def _serve(self, join: pb.PairJoin, context: Context) -> None:
        self._generation += 1
        name = f"{join.sender}:{self._incarnation}:{self._generation}:{token_hex(8)}"
        backend = self._backend(join)
        store = await self._open_store()
        group = PairGroup(
            self._memory,
            name=name,
            rank=DECODE_RANK,
            backend=backend,
            host=self._host,
            staging_bytes=join.offer_bytes,
            timeout_s=self._timeout_s,
        )
        thread = PairThread(f"collective.{join.sender}")
        self._threads = {thread for thread in self._threads if thread.alive} | {thread}
        try:
            await context.write(pb.PairReply(joined=pb.PairJoined(group=name, store_port=store.port, backend=backend)))
            await thread.run(group.connect, store.store)
            log.info("pair_made", theirs=join.sender, ours=self._incarnation, backend=backend)
            seq = 0
            while (request := await context.read()) is not EOF:
                seq += 1
                await self._take(request.offer, seq, join, group, thread, context)
        finally:
            thread.stop(group.close)

    async def _take(
        self,
        offer: pb.PairOffer,
        seq: int,
        join: pb.PairJoin,
        group: PairGroup,
        thread: PairThread,
        context: Context,
    ) -> None:
        """One offer. Raises TransferFailed when the pair is of no use any more."""
        if offer.seq != seq:
            raise TransferFailed(f"offer {offer.seq} where {seq} was due")
        if not 0 < offer.count * self._memory.layout.page_bytes <= join.offer_bytes:
            raise TransferFailed(f"an offer of {offer.count} pages; the pair was made for {join.offer_bytes} bytes")
        writer = offer.writer
        write = PageWrite(LeaseId(writer.lease_id), writer.epoch, writer.nonce, offer.first, offer.count)
        try:
            ticket = self._intake.begin(write)
        except TransferFailed as error:
            await context.write(pb.PairReply(refused=pb.PairRefused(seq=seq, reason=error.message)))
            return
        damage = await self._receive(ticket, seq, group, thread, context)
        if damage is not None:
            await context.write(pb.PairReply(refused=pb.PairRefused(seq=seq, reason=damage)))
        else:
            await context.write(pb.PairReply(received=pb.PairReceived(seq=seq)))

    async def _receive(
        self, ticket: WriteTicket, seq: int, group: PairGroup, thread: PairThread, context: Context
    ) -> str | None:
        """What is wrong with the bytes, None once they are in place. The ticket is ended whatever happens."""
        verified = False
        try:
            await context.write(pb.PairReply(ready=pb.PairReady(seq=seq)))
            await thread.run(group.receive, len(ticket.pages), time.monotonic() + self._timeout_s)
            done = (await self._read(context)).done
            if done.seq != seq:
                raise TransferFailed(f"done with {done.seq} where {seq} was due")
            try:
                self._intake.land(ticket)
                # To the end, also when the stream breaks: the pool is being written.
                await thread.finish(group.land, ticket.pages, list(done.checksums))
            except TransferFailed as error:
                return error.message
            verified = True
            return None
        finally:
            self._intake.end(ticket, verified)

    async def _read(self, context: Context) -> pb.PairRequest:
        """The message that is due now."""
        try:
            async with asyncio.timeout(self._timeout_s):
                request = await context.read()
        except TimeoutError:
            raise TransferFailed(f"nothing came for {self._timeout_s} s") from None
        if request is EOF:
            raise TransferFailed("the sender left in between")
        assert isinstance(request, pb.PairRequest)
        return request

    def _check(self, join: pb.PairJoin) -> None:
        if join.incarnation != self._incarnation:
            raise TransferFailed(f"{join.incarnation} is not here any more; this is {self._incarnation}")
        check_compatible(self._memory.layout, layout_from_wire(join.layout))
        if not 0 < join.offer_bytes <= max(MAX_OFFER_BYTES, self._memory.layout.page_bytes):
            raise TransferFailed(f"offers of {join.offer_bytes} bytes; at most {MAX_OFFER_BYTES}")

    def _backend(self, join: pb.PairJoin) -> str:
        if not (join.device.startswith("cuda") and self._device.startswith("cuda")):
            return "gloo"
        if join.device != self._device:
            return "nccl"
        log.warning("same_gpu", device=self._device, theirs=join.sender, note="NCCL refuses; gloo through the host")
        return "gloo"

    async def _open_store(self) -> PairStore:
        """Opened by the first pair."""
        if self._store is None:
            self._store = asyncio.create_task(
                asyncio.to_thread(PairStore, self._host, self._timeout_s), name="collective.store"
            )
        try:
            return await asyncio.shield(self._store)
        except (OSError, RuntimeError) as error:
            self._store = None
            raise TransferFailed(f"no store on {self._host}: {error}") from error

    async def close(self) -> None:
        """End all pairs. Idempotent."""
        tasks = list(self._pairs.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        if self._store is not None:
            await asyncio.wait([self._store], timeout=CLOSE_S)
            self._store = None
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if not await thread.wait_ended(max(0.0, deadline_s - time.monotonic())):
                log.warning("group_still_waits", reason="its peer is frozen; the thread ends with its operation")
