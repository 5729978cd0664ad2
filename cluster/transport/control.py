"""What the sending halves that talk gRPC share: credentials, the commit and the abort, and how a refusal is read."""

import asyncio
import time

import grpc
import grpc.aio
import structlog

from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import COMMIT_TIMEOUT_S
from twostroke.cluster.wire.logprobs import logprobs_to_wire
from twostroke.cluster.wire.status import from_rpc
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1.kv_transfer_pb2_grpc import KvTransferStub

log = structlog.get_logger(__name__)

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
ABORT_TIMEOUT_S = 2.0
COMMIT_ATTEMPTS = 3
COMMIT_PAUSE_S = 0.2


def writer_of(lease: Lease) -> pb.Writer:
    return pb.Writer(lease_id=lease.lease_id, epoch=lease.epoch, nonce=lease.nonce)


def failed(what: str, lease: Lease, error: grpc.aio.AioRpcError) -> TransferFailed | LayoutMismatch:
    """The error to raise for a call that failed: a layout that differs keeps its name, all else is TransferFailed."""
    known = from_rpc(error)
    if isinstance(known, LayoutMismatch):
        return known
    return TransferFailed(f"{what} to {lease.worker_id}: {error.code().name}: {error.details()}")


def commit_to_wire(
    lease: Lease, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None
) -> pb.CommitPages:
    return pb.CommitPages(
        writer=writer_of(lease),
        num_pages=len(lease.shards[0].pages),
        first_token=first_token,
        first_token_index=first_token_index,
        first_logprob=None if first_logprob is None else logprobs_to_wire([first_logprob]),
    )


async def send_commit(stub: KvTransferStub, lease: Lease, request: pb.CommitPages, timeout_s: float) -> None:
    """Until the Ack. Repeated when the connection breaks, since an equal commit is acknowledged again.

    Raises TransferFailed after COMMIT_TIMEOUT_S or a few `timeout_s` at most.
    """
    deadline_s = time.monotonic() + min(COMMIT_TIMEOUT_S, COMMIT_ATTEMPTS * timeout_s)
    for attempt in range(COMMIT_ATTEMPTS):
        try:
            await stub.Commit(request, timeout=max(0.0, deadline_s - time.monotonic()))
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == COMMIT_ATTEMPTS - 1:
                raise failed("commit", lease, error) from error
            await asyncio.sleep(COMMIT_PAUSE_S)


async def send_abort(stub: KvTransferStub, lease: Lease, reason: str) -> None:
    """Best effort, for ABORT_TIMEOUT_S at most."""
    try:
        await stub.Abort(pb.AbortPages(writer=writer_of(lease), reason=reason), timeout=ABORT_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("abort_untold", lease=lease.lease_id, error=error.details())
