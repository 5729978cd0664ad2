"""Pages over gRPC: works on any network, with back-pressure by HTTP/2 and a crc32 a page.

    1. open    layouts compared here; a pair's first shipment asks who answers at the address (`Agree`)
    2. push    pages copied out of the pool and summed in a thread, then one client-streaming call: header, parts of
               `message_bytes`; its answer means verified and in place. At most `PUSH_BYTES` a call; the next call's
               pages are copied while one is under way. A call may wait for its turn at the receiver as long as the
               engine lets it; from then on it has `operation_timeout_s`
    3. commit  repeated within its deadline when the connection breaks, since an equal commit is acknowledged again
    4. abort   best effort

A cancelled call has let go of the pool when the cancellation comes out of it. One channel a decode incarnation,
closed when unused for `idle_s` or when another incarnation answers at its address.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from zlib import crc32

import grpc
import grpc.aio
import structlog

from twostroke.cluster.aio import TaskOwner, in_thread
from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import OnAccepted, TransferStats, unheard
from twostroke.cluster.transport.control import commit_to_wire, failed, send_abort, send_commit, writer_of
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.convert import layout_to_wire
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

log = structlog.get_logger(__name__)

PUSH_BYTES = 16 << 20

Key = tuple[str, Incarnation]


class _Pair:
    """The channel to one decode incarnation."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self.stub = kv_transfer_pb2_grpc.KvTransferStub(self.channel)  # type: ignore[no-untyped-call]
        self.agreed = False
        self.num_open = 0
        self.idle: asyncio.TimerHandle | None = None


class GrpcTransport:
    """Implements `base.Transport`."""

    name = "grpc"

    def __init__(
        self,
        memory: PageMemory,
        incarnation: Incarnation,
        *,
        message_bytes: int = 1 << 20,
        operation_timeout_s: float = 10.0,
        idle_s: float = 300.0,
    ) -> None:
        """`incarnation` is the sender's own, for the logs."""
        self.memory = memory
        self.message_bytes = message_bytes
        self.timeout_s = operation_timeout_s
        self._incarnation = incarnation
        self._idle_s = idle_s
        self._pairs: dict[Key, _Pair] = {}
        self._tasks = TaskOwner("grpc_transport")

    async def open(self, lease: Lease, on_accepted: OnAccepted = unheard) -> "GrpcShipment":
        check_compatible(self.memory.layout, lease.layout)
        key = (lease.shards[0].address, lease.incarnation)
        pair = self._acquire(key)
        try:
            if not pair.agreed:
                await self._agree(pair, lease)
        except BaseException:
            self.release(key, pair)
            raise
        return GrpcShipment(self, lease, key, pair, on_accepted)

    async def _agree(self, pair: _Pair, lease: Lease) -> None:
        request = pb.AgreeRequest(incarnation=lease.incarnation, layout=layout_to_wire(self.memory.layout))
        try:
            await pair.stub.Agree(request, timeout=self.timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failed("agree", lease, error) from error
        pair.agreed = True
        log.info("pair_agreed", ours=self._incarnation, theirs=lease.incarnation, address=lease.shards[0].address)
        for key, other in list(self._pairs.items()):
            if key[0] == lease.shards[0].address and key[1] != lease.incarnation and not other.num_open:
                self._drop(key)

    def _acquire(self, key: Key) -> _Pair:
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(key[0])
        pair.num_open += 1
        if pair.idle is not None:
            pair.idle.cancel()
            pair.idle = None
        return pair

    def release(self, key: Key, pair: _Pair) -> None:
        """A shipment of this pair is over."""
        pair.num_open -= 1
        if pair.num_open or self._pairs.get(key) is not pair:
            return
        if pair.agreed:
            pair.idle = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)
        else:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        pair = self._pairs.pop(key)
        if pair.idle is not None:
            pair.idle.cancel()
        self._tasks.spawn(pair.channel.close(grace=None), f"close.{key[1]}")

    async def close(self) -> None:
        while self._pairs:
            _, pair = self._pairs.popitem()
            if pair.idle is not None:
                pair.idle.cancel()
            await pair.channel.close(grace=None)
        await self._tasks.close()


class GrpcShipment:
    """Implements `base.Shipment`."""

    def __init__(self, transport: GrpcTransport, lease: Lease, key: Key, pair: _Pair, on_accepted: OnAccepted) -> None:
        """The pair is acquired for us."""
        self._transport = transport
        self._lease = lease
        self._key = key
        self._pair = pair
        self._on_accepted = on_accepted
        self._num_pages = 0
        self._busy_s = 0.0
        self._open = True

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        memory = self._transport.memory
        at_once = max(1, PUSH_BYTES // memory.layout.page_bytes)
        started_s = time.monotonic()
        call: grpc.aio.StreamUnaryCall[pb.PushPart, pb.PushReply] | None = None
        try:
            for start in range(0, len(pages), at_once):
                some = pages[start : start + at_once]
                data, checksums = await in_thread(_read, memory, some)
                if call is not None:
                    await self._finish(call)
                call = self._start(first + start, data, checksums)
            if call is not None:
                await self._finish(call)
        except grpc.aio.AioRpcError as error:
            raise failed("push", self._lease, error) from error
        finally:
            if call is not None:
                call.cancel()
            self._busy_s += time.monotonic() - started_s
        self._num_pages += len(pages)

    def _start(
        self, first: int, data: bytes, checksums: list[int]
    ) -> "grpc.aio.StreamUnaryCall[pb.PushPart, pb.PushReply]":
        """Starts to send at once."""
        size = self._transport.message_bytes

        async def parts() -> AsyncIterator[pb.PushPart]:
            header = pb.PushHeader(writer=writer_of(self._lease), first=first, checksums=checksums)
            yield pb.PushPart(header=header)
            for start in range(0, len(data), size):
                yield pb.PushPart(data=data[start : start + size])

        call: grpc.aio.StreamUnaryCall[pb.PushPart, pb.PushReply] = self._pair.stub.Push(parts())
        return call

    async def _finish(self, call: "grpc.aio.StreamUnaryCall[pb.PushPart, pb.PushReply]") -> None:
        await call.initial_metadata()
        try:
            async with asyncio.timeout(self._transport.timeout_s):
                await call
        except TimeoutError:
            told = f"push to {self._lease.worker_id}: not within {self._transport.timeout_s:g} s of its turn"
            raise TransferFailed(told) from None
        self._on_accepted()

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        commit = commit_to_wire(self._lease, first_token, first_token_index, first_logprob)
        await send_commit(self._pair.stub, self._lease, commit, self._transport.timeout_s)
        self._end()
        num_bytes = self._num_pages * self._transport.memory.layout.page_bytes
        return TransferStats("grpc", self._num_pages, num_bytes, self._busy_s)

    async def abort(self, reason: str) -> None:
        if not self._open:
            return
        try:
            await send_abort(self._pair.stub, self._lease, reason)
        finally:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._transport.release(self._key, self._pair)


def _read(memory: PageMemory, pages: Sequence[PageId]) -> tuple[bytes, list[int]]:
    """The pages' bytes, copied, and their checksums."""
    data = bytes(memory.read(pages))
    size = memory.layout.page_bytes
    view = memoryview(data)
    return data, [crc32(view[start : start + size]) for start in range(0, len(data), size)]
