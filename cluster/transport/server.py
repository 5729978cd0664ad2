"""The decode side of the gRPC transport: checks, then writes into leased pages.

A push is received whole (at most `MAX_PUSH_BYTES`, `MAX_PUSHES` at a time), its checksums are compared in a
thread, and only then are the bytes written to the pool: a damaged or torn push never touches a page. The intake's
`begin` comes with the header, `land` with the last byte, `end` after the write, whatever happens between. A push whose
turn has come is told so (initial metadata), and from then on has `timeout_s`: a frozen sender holds up the others no
longer.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn, TypeAlias
from zlib import crc32

import grpc
import grpc.aio

from twostroke.cluster.aio import in_thread
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, LeaseId, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.transport.base import CommitRequest, Intake, PageWrite
from twostroke.cluster.wire.convert import WireError, layout_from_wire
from twostroke.cluster.wire.logprobs import first_logprob_from_wire
from twostroke.cluster.wire.status import abort_with
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1 import kv_transfer_pb2_grpc

MAX_PUSH_BYTES = 64 << 20
MAX_PUSHES = 8

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def add_transfer_services(
    server: grpc.aio.Server, intake: Intake, memory: PageMemory, incarnation: Incarnation, timeout_s: float = 10.0
) -> None:
    """Mount what prefill workers call; before the server starts."""
    servicer = TransferServicer(intake, memory, incarnation, timeout_s)
    kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


class TransferServicer(kv_transfer_pb2_grpc.KvTransferServicer):
    def __init__(self, intake: Intake, memory: PageMemory, incarnation: Incarnation, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._intake = intake
        self._memory = memory
        self._incarnation = incarnation
        self._slots = asyncio.Semaphore(MAX_PUSHES)

    async def Agree(self, request: pb.AgreeRequest, context: Context) -> pb.AgreeReply:
        if request.incarnation != self._incarnation:
            await refuse(context, f"{request.incarnation} is not here any more; this is {self._incarnation}")
        try:
            check_compatible(self._memory.layout, layout_from_wire(request.layout))
        except LayoutMismatch as error:
            await abort_with(context, error)
        return pb.AgreeReply()

    async def Push(self, parts: AsyncIterator[pb.PushPart], context: Context) -> pb.PushReply:
        try:
            async with self._slots:
                await context.send_initial_metadata(())
                async with asyncio.timeout(self._timeout_s):
                    await self._push(parts)
        except TransferFailed as error:
            await refuse(context, error.message)
        except TimeoutError:
            await refuse(context, f"the push was not whole within {self._timeout_s:g} s")
        return pb.PushReply()

    async def _push(self, parts: AsyncIterator[pb.PushPart]) -> None:
        first = await anext(aiter(parts), None)
        if first is None or not first.HasField("header"):
            raise TransferFailed("a push without a header")
        header = first.header
        checksums = list(header.checksums)
        size = len(checksums) * self._memory.layout.page_bytes
        if size > MAX_PUSH_BYTES:
            raise TransferFailed(f"a push of {size} bytes; at most {MAX_PUSH_BYTES}")
        writer = header.writer
        write = PageWrite(LeaseId(writer.lease_id), writer.epoch, writer.nonce, header.first, len(checksums))
        ticket = self._intake.begin(write)
        verified = False
        try:
            data = bytearray()
            async for part in parts:
                if len(data) + len(part.data) > size:
                    raise TransferFailed(f"more than the {size} bytes that the header names")
                data += part.data
            if len(data) != size:
                raise TransferFailed(f"{len(data)} of the {size} bytes that the header names")
            self._intake.land(ticket)
            await in_thread(_store, self._memory, ticket.pages, data, checksums)
            verified = True
        finally:
            self._intake.end(ticket, verified)

    async def Commit(self, request: pb.CommitPages, context: Context) -> pb.CommitReply:
        writer = request.writer
        try:
            commit = CommitRequest(
                LeaseId(writer.lease_id),
                writer.epoch,
                writer.nonce,
                request.num_pages,
                request.first_token,
                request.first_token_index,
                first_logprob_from_wire(request),
            )
            self._intake.commit(commit)
        except (TransferFailed, WireError) as error:
            await refuse(context, error.message)
        return pb.CommitReply()

    async def Abort(self, request: pb.AbortPages, context: Context) -> pb.AbortReply:
        writer = request.writer
        try:
            self._intake.abort(LeaseId(writer.lease_id), writer.epoch, writer.nonce, request.reason)
        except TransferFailed as error:
            await refuse(context, error.message)
        return pb.AbortReply()


def _store(memory: PageMemory, pages: Sequence[PageId], data: bytearray, checksums: Sequence[int]) -> None:
    """Raises TransferFailed, before anything is written, when a page's checksum differs."""
    size = memory.layout.page_bytes
    view = memoryview(data)
    for index, checksum in enumerate(checksums):
        if crc32(view[index * size : (index + 1) * size]) != checksum:
            raise TransferFailed(f"page {index} of the push arrived damaged")
    if pages:
        memory.write(pages, view)


async def refuse(context: Context, message: str) -> NoReturn:
    """End the call: a refusal, which UNAVAILABLE (a broken connection, worth another try) is not."""
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
    raise AssertionError("abort returned")
