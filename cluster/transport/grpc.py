"""Pages over gRPC: works on any network, with back-pressure by HTTP/2 and a crc32 a page.

    1. open    layouts compared here; a pair's first shipment asks who answers at the address (`Agree`)
    2. push    pages copied out of the pool and summed in a thread, then one client-streaming call: header, parts of
               `message_bytes`; its answer means verified and in place. At most `PUSH_BYTES` a call
    3. commit  repeated within its deadline when the connection breaks, since an equal commit is acknowledged again
    4. abort   best effort

A cancelled call has let go of the pool when the cancellation comes out of it. One channel a decode incarnation,
the least recently used closed beyond `MAX_PAIRS`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from zlib import crc32

import grpc
import grpc.aio
import structlog

from twostroke.cluster.aio import in_thread
from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import COMMIT_TIMEOUT_S, TransferStats
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.convert import layout_to_wire
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

log = structlog.get_logger(__name__)

PUSH_BYTES = 16 << 20
MAX_PAIRS = 64
ABORT_TIMEOUT_S = 2.0
COMMIT_ATTEMPTS = 3
COMMIT_PAUSE_S = 0.2


class _Pair:
    """The channel to one decode incarnation."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)
        self.stub = kv_transfer_pb2_grpc.KvTransferStub(self.channel)  # type: ignore[no-untyped-call]
        self.agreed = False
        self.num_open = 0


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
    ) -> None:
        """`incarnation` is the sender's own, for the logs."""
        self._memory = memory
        self._incarnation = incarnation
        self._message_bytes = message_bytes
        self._timeout_s = operation_timeout_s
        self._pairs: OrderedDict[tuple[str, Incarnation], _Pair] = OrderedDict()

    async def open(self, lease: Lease) -> "GrpcShipment":
        check_compatible(self._memory.layout, lease.layout)
        pair = await self._pair(lease)
        if not pair.agreed:
            request = pb.AgreeRequest(incarnation=lease.incarnation, layout=layout_to_wire(self._memory.layout))
            try:
                await pair.stub.Agree(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                raise _failed("agree", lease, error) from error
            pair.agreed = True
            log.info("pair_agreed", ours=self._incarnation, theirs=lease.incarnation, address=lease.shards[0].address)
        return GrpcShipment(lease, pair, self._memory, self._message_bytes, self._timeout_s)

    async def _pair(self, lease: Lease) -> _Pair:
        key = (lease.shards[0].address, lease.incarnation)
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = _Pair(key[0])
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            idle = next((key for key, pair in self._pairs.items() if pair.num_open == 0), None)
            if idle is not None and idle != key:
                await self._pairs.pop(idle).channel.close(grace=None)
        return pair

    async def close(self) -> None:
        while self._pairs:
            _, pair = self._pairs.popitem()
            await pair.channel.close(grace=None)


class GrpcShipment:
    """Implements `base.Shipment`."""

    def __init__(self, lease: Lease, pair: _Pair, memory: PageMemory, message_bytes: int, timeout_s: float) -> None:
        self._lease = lease
        self._pair = pair
        self._memory = memory
        self._message_bytes = message_bytes
        self._timeout_s = timeout_s
        self._writer = pb.Writer(lease_id=lease.lease_id, epoch=lease.epoch, nonce=lease.nonce)
        self._num_pages = 0
        self._busy_s = 0.0
        self._open = True
        pair.num_open += 1

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        at_once = max(1, PUSH_BYTES // self._memory.layout.page_bytes)
        started_s = time.monotonic()
        try:
            for start in range(0, len(pages), at_once):
                await self._push(first + start, pages[start : start + at_once])
        finally:
            self._busy_s += time.monotonic() - started_s

    async def _push(self, first: int, pages: Sequence[PageId]) -> None:
        data, checksums = await in_thread(_read, self._memory, pages)

        async def parts() -> AsyncIterator[pb.PushPart]:
            yield pb.PushPart(header=pb.PushHeader(writer=self._writer, first=first, checksums=checksums))
            for start in range(0, len(data), self._message_bytes):
                yield pb.PushPart(data=data[start : start + self._message_bytes])

        try:
            await self._pair.stub.Push(parts(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _failed("push", self._lease, error) from error
        self._num_pages += len(pages)

    async def commit(self, first_token: int, first_token_index: int) -> TransferStats:
        request = pb.CommitPages(
            writer=self._writer,
            num_pages=len(self._lease.shards[0].pages),
            first_token=first_token,
            first_token_index=first_token_index,
        )
        deadline_s = time.monotonic() + min(COMMIT_TIMEOUT_S, COMMIT_ATTEMPTS * self._timeout_s)
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                await self._pair.stub.Commit(request, timeout=max(0.0, deadline_s - time.monotonic()))
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == COMMIT_ATTEMPTS - 1:
                    raise _failed("commit", self._lease, error) from error
                await asyncio.sleep(COMMIT_PAUSE_S)
        self._end()
        num_bytes = self._num_pages * self._memory.layout.page_bytes
        return TransferStats("grpc", self._num_pages, num_bytes, self._busy_s)

    async def abort(self, reason: str) -> None:
        if not self._open:
            return
        self._end()
        try:
            await self._pair.stub.Abort(pb.AbortPages(writer=self._writer, reason=reason), timeout=ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("abort_untold", lease=self._lease.lease_id, error=error.details())

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._pair.num_open -= 1


def _read(memory: PageMemory, pages: Sequence[PageId]) -> tuple[bytes, list[int]]:
    """The pages' bytes, copied, and their checksums."""
    data = bytes(memory.read(pages))
    size = memory.layout.page_bytes
    view = memoryview(data)
    return data, [crc32(view[start : start + size]) for start in range(0, len(data), size)]


def _failed(what: str, lease: Lease, error: grpc.aio.AioRpcError) -> TransferFailed:
    return TransferFailed(f"{what} to {lease.worker_id}: {error.code().name}: {error.details()}")
