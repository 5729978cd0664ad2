"""The attached stream over gRPC: one a router and worker, with everything they have to say to each other.

    router: connect()                                     worker: AttachServicer(app)
    1. hello {router incarnation}  ------------------->   session = app.attach(router, outlet)
    2.                             <-------------------   hello {WorkerInfo}: who answers at this address now
    3. link.send -> outbox -> frames ----------------->   session.receive
       listener.on_messages        <-------------------   frames <- outbox <- outlet.deliver
    4. an empty frame when nothing was sent for 500 ms; 3 s without a frame end the stream
    5. on_lost (at most once)                             session.closed (exactly once)

Each end is one `cluster.stream.FrameStream`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import PeerLost, TwostrokeError
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.link import LinkListener, WorkerApp
from twostroke.cluster.core.messages import RouterMessage, WorkerCheck, WorkerInfo, WorkerMessage
from twostroke.cluster.stream import (
    CALL_ERRORS,
    DEFAULT_TIMING,
    FrameCall,
    FrameStream,
    Timing,
    describe_error,
    frame_or_none,
)
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.codec import RouterCodec, WorkerCodec
from twostroke.cluster.wire.convert import WireError
from twostroke.cluster.wire.messages import (
    check_from_wire,
    check_to_wire,
    info_from_wire,
    info_to_wire,
    snapshot_from_wire,
    snapshot_to_wire,
)
from twostroke.proto.v1 import worker_pb2 as pb
from twostroke.proto.v1 import worker_pb2_grpc

log = structlog.get_logger(__name__)

WORKER_OUTBOX_BYTES = 8 << 20
ROUTER_OUTBOX_BYTES = 32 << 20
"""Wider than the worker's: prompts go this way."""


# ------------------------------------------------------------------------------------------------- worker


class AttachServicer(worker_pb2_grpc.WorkerServicer):
    """The worker's face: `Attach` and the calls about the worker as a whole. Add it to a server, `close` it before."""

    def __init__(self, app: WorkerApp, timing: Timing = DEFAULT_TIMING) -> None:
        self._app = app
        self._timing = timing
        self._attached: dict[Incarnation, _Attached] = {}
        self._closed_for = ""

    async def close(self, reason: str, flush_s: float = 0.0) -> None:
        """End all streams, each after what was said on it, and refuse new ones. Idempotent."""
        self._closed_for = reason
        streams = [attached.stream for attached in self._attached.values()]
        await asyncio.gather(*(stream.flush(flush_s) for stream in streams))
        for stream in streams:
            stream.end(reason)

    @property
    def num_attached(self) -> int:
        return len(self._attached)

    async def Attach(
        self, requests: object, context: "grpc.aio.ServicerContext[pb.RouterFrame, pb.WorkerFrame]"
    ) -> None:
        try:
            async with asyncio.timeout(self._timing.hello_s):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        hello = frame_or_none(first, pb.RouterFrame)
        if hello is None or not hello.hello.router:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must say who attaches")
        router = Incarnation(hello.hello.router)
        if self._closed_for:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._closed_for)
        older = self._attached.pop(router, None)
        if older is not None:
            older.closed("the router attached again")
            older.stream.end("the router attached again")
        attached = _Attached(self._app, router, context, self._timing)
        self._attached[router] = attached
        log.info("router_attached", router=router)
        try:
            await context.write(pb.WorkerFrame(hello=pb.WorkerHello(info=info_to_wire(self._app.info))))
            await attached.stream.run()
        finally:
            attached.stream.end("the stream broke before the hello")
            if self._attached.get(router) is attached:
                del self._attached[router]

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.WorkerInfo:
        return info_to_wire(self._app.info)

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: "grpc.aio.ServicerContext[pb.SnapshotRequest, pb.SnapshotPart]"
    ) -> None:
        try:
            snapshot = await self._app.snapshot()
        except TwostrokeError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        for part in snapshot_to_wire(snapshot):
            await context.write(part)

    async def Check(
        self, request: pb.CheckRequest, context: "grpc.aio.ServicerContext[pb.CheckRequest, pb.CheckReply]"
    ) -> pb.CheckReply:
        try:
            return check_to_wire(await self._app.check())
        except TwostrokeError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainReply:
        return pb.DrainReply(drained=await self._app.drain(request.timeout_s))


class _Attached:
    """One router's stream and session: the `Outlet` that the app speaks through."""

    def __init__(
        self,
        app: WorkerApp,
        router: Incarnation,
        context: "grpc.aio.ServicerContext[pb.RouterFrame, pb.WorkerFrame]",
        timing: Timing,
    ) -> None:
        self._router = router
        self._codec = WorkerCodec()
        self._closed = False

        async def read() -> tuple[Sequence[pb.RouterItem], bytes, bool] | None:
            frame = frame_or_none(await context.read(), pb.RouterFrame)
            return None if frame is None else (frame.items, frame.fragment, frame.fragment_end)

        async def write(items: list[pb.WorkerItem], fragment: bytes, fragment_end: bool) -> None:
            await context.write(pb.WorkerFrame(items=items, fragment=fragment, fragment_end=fragment_end))

        call = FrameCall(read, write, pb.RouterItem.FromString)
        self.stream = FrameStream(call, self._receive, self.closed, WORKER_OUTBOX_BYTES, timing)
        self._session = app.attach(router, self)

    def deliver(self, messages: Sequence[WorkerMessage]) -> None:
        if not self.stream.ended:
            encoded = (self._codec.encode(message) for message in messages)
            self.stream.send([item for item in encoded if item is not None])

    def _receive(self, items: Sequence[pb.RouterItem]) -> None:
        decoded = (self._codec.decode(item) for item in items)
        self._session.receive([message for message in decoded if message is not None])

    def closed(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            log.info("router_detached", router=self._router, reason=reason, dropped=self._codec.dropped)
            self._session.closed(reason)


# ------------------------------------------------------------------------------------------------- router


class AttachedLink:
    """The router's end, a `WorkerLink`. Made by `connect`."""

    def __init__(
        self,
        info: WorkerInfo,
        listener: LinkListener,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[pb.RouterFrame, pb.WorkerFrame]",
        timing: Timing,
    ) -> None:
        self.info = info
        self._listener = listener
        self._channel = channel
        self._rpc = call
        self._codec = RouterCodec()
        self._quiet = False
        self._tasks = TaskOwner(f"link.{info.worker_id}")

        async def read() -> tuple[Sequence[pb.WorkerItem], bytes, bool] | None:
            frame = frame_or_none(await call.read(), pb.WorkerFrame)
            return None if frame is None else (frame.items, frame.fragment, frame.fragment_end)

        async def write(items: list[pb.RouterItem], fragment: bytes, fragment_end: bool) -> None:
            await call.write(pb.RouterFrame(items=items, fragment=fragment, fragment_end=fragment_end))

        wire = FrameCall(read, write, pb.WorkerItem.FromString)
        self._stream = FrameStream(wire, self._receive, self._on_end, ROUTER_OUTBOX_BYTES, timing)
        self._running = self._tasks.spawn(self._run(), "run")

    def send(self, messages: Sequence[RouterMessage]) -> None:
        if not self._stream.ended:
            encoded = (self._codec.encode(message) for message in messages)
            self._stream.send([item for item in encoded if item is not None])

    def close(self, reason: str) -> None:
        self._quiet = True
        self._stream.end(reason)

    async def wait_closed(self) -> None:
        """Until the call and the channel are closed; only after `close` or `on_lost`."""
        await asyncio.shield(self._running)

    def _receive(self, items: Sequence[pb.WorkerItem]) -> None:
        decoded = (self._codec.decode(item) for item in items)
        messages = [message for message in decoded if message is not None]
        if messages:
            self._listener.on_messages(self, messages)

    def _on_end(self, reason: str) -> None:
        log.info("worker_detached", worker=self.info.worker_id, reason=reason, dropped=self._codec.dropped)
        # The call first: a worker that still lives must hear at once that it may free everything.
        self._rpc.cancel()
        if not self._quiet:
            self._quiet = True
            self._listener.on_lost(self, reason)

    async def _run(self) -> None:
        try:
            await self._stream.run()
        finally:
            self._rpc.cancel()
            await self._channel.close(grace=None)


async def connect(
    address: str,
    router: Incarnation,
    listener: LinkListener,
    *,
    timing: Timing = DEFAULT_TIMING,
) -> AttachedLink:
    """Attach to whatever worker answers at host:port; `link.info` says which incarnation that is.

    The listener may hear from the link before this returns to the caller. Raises PeerLost when nobody
    answers with a hello in time.
    """
    channel = open_channel(address)
    call: grpc.aio.StreamStreamCall[pb.RouterFrame, pb.WorkerFrame] | None = None
    try:
        async with asyncio.timeout(timing.hello_s):
            call = _stub(channel).Attach()
            await call.write(pb.RouterFrame(hello=pb.RouterHello(router=router)))
            frame = frame_or_none(await call.read(), pb.WorkerFrame)
        if frame is None:
            raise WireError("the stream ended before a hello")
        return AttachedLink(info_from_wire(frame.hello.info), listener, channel, call, timing)
    except (*CALL_ERRORS, WireError, TimeoutError) as error:
        await _give_up(channel, call)
        raise PeerLost(f"cannot attach to {address}: {describe_error(error)}") from error
    except asyncio.CancelledError:
        await _give_up(channel, call)
        raise


async def _give_up(channel: grpc.aio.Channel, call: grpc.aio.Call | None) -> None:
    if call is not None:
        call.cancel()
    await channel.close(grace=None)


def _stub(channel: grpc.aio.Channel) -> worker_pb2_grpc.WorkerStub:
    return worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------- calls of their own


@asynccontextmanager
async def _calling(address: str, what: str) -> AsyncIterator[worker_pb2_grpc.WorkerStub]:
    channel = open_channel(address)
    try:
        yield _stub(channel)
    except (*CALL_ERRORS, WireError) as error:
        raise PeerLost(f"{what} at {address} failed: {describe_error(error)}") from error
    finally:
        await channel.close(grace=None)


async def describe(address: str, timeout_s: float = 5.0) -> WorkerInfo:
    """Who answers at host:port. Raises PeerLost."""
    async with _calling(address, "Describe") as stub:
        return info_from_wire(await stub.Describe(pb.DescribeRequest(), timeout=timeout_s))


async def fetch_snapshot(address: str, timeout_s: float = 10.0) -> PrefixSnapshot:
    """The named pages of the worker at host:port, of whichever incarnation lives there. Raises PeerLost."""
    async with _calling(address, "Snapshot") as stub:
        return snapshot_from_wire([part async for part in stub.Snapshot(pb.SnapshotRequest(), timeout=timeout_s)])


async def check(address: str, timeout_s: float = 10.0) -> WorkerCheck:
    """What the worker at host:port holds, and whether its books agree. Raises PeerLost."""
    async with _calling(address, "Check") as stub:
        return check_from_wire(await stub.Check(pb.CheckRequest(), timeout=timeout_s))


async def request_drain(address: str, drain_s: float) -> bool:
    """Ask the worker at host:port to drain; True when it had nothing left in time. Raises PeerLost."""
    async with _calling(address, "Drain") as stub:
        reply = await stub.Drain(pb.DrainRequest(timeout_s=drain_s), timeout=drain_s + 5.0)
        return bool(reply.drained)
