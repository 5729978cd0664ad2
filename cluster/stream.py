"""One end of an attached stream: frames of items both ways over a gRPC call, and how it ends.

A reader, a writer and a ticker task. Whatever ends it (EOF, an error of the call, silence, a full outbox, a peer
that makes no sense, the owner) goes through `FrameStream.end`, which is idempotent and tells the owner on the
next turn of the loop, so that nobody is re-entered, and before any clean-up of the call, so that a peer that no
longer reads cannot delay it.

Silence is counted in ticks of our own clock, not in seconds: a process that was itself stopped for a while
wakes to one late tick and then hears what its peer sent meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.wire.codec import Assembly, Item, Outbox
from twostroke.cluster.wire.convert import WireError


@dataclass(frozen=True, slots=True)
class Timing:
    """When an end speaks, and when it gives the other up. Seconds."""

    beat_s: float = 0.5
    silence_s: float = 3.0
    hello_s: float = 5.0


DEFAULT_TIMING = Timing()

# What grpc.aio raises from a read or write of a call that ended or is ending.
CALL_ERRORS = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError)

InT = TypeVar("InT", bound=Item)
OutT = TypeVar("OutT", bound=Item)


@dataclass(frozen=True, slots=True)
class FrameCall(Generic[InT, OutT]):
    """A gRPC call as frames. `read` returns None at the end of the peer's half."""

    read: Callable[[], Awaitable[tuple[Sequence[InT], bytes, bool] | None]]
    write: Callable[[list[OutT], bytes, bool], Awaitable[object]]
    parse: Callable[[bytes], InT]


class FrameStream(Generic[InT, OutT]):
    """One end of an attached stream after the hellos. `run` once; all methods on the event loop."""

    def __init__(
        self,
        call: FrameCall[InT, OutT],
        receive: Callable[[Sequence[InT]], None],
        on_end: Callable[[str], None],
        max_bytes: int,
        timing: Timing,
    ) -> None:
        self._call = call
        self._receive = receive
        self._on_end = on_end
        self._assembly = Assembly(call.parse)
        self._outbox: Outbox[OutT] = Outbox(max_bytes)
        self._max_bytes = max_bytes
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._over = asyncio.Event()
        self._tick_s = timing.beat_s / 2
        self._max_silent_ticks = max(2, round(timing.silence_s / self._tick_s))
        self._sent = False
        self._heard = False
        self._beat = False

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def send(self, items: Sequence[OutT]) -> None:
        if self.ended:
            return
        for item in items:
            if not self._outbox.put(item):
                self.end(f"the peer reads too slowly: over {self._max_bytes} bytes wait to be sent")
                return
        if items:
            self._flushed.clear()
            self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Until everything sent so far has been handed to gRPC, the stream ended, or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._flushed.wait()

    def end(self, reason: str) -> None:
        """Idempotent. From here on nothing is received; `on_end(reason)` follows on the next turn of the loop."""
        if not self.ended:
            self._over.set()
            self._flushed.set()
            asyncio.get_running_loop().call_soon(self._on_end, reason)

    async def run(self) -> None:
        """Until the stream ended and no task of it is left. Cancelling it ends the stream."""
        owner = TaskOwner("attach", on_failure=lambda name, error: self.end(f"{name}: {error!r}"))
        for work, name in ((self._read(), "read"), (self._write(), "write"), (self._tick(), "tick")):
            owner.spawn(work, name)
        try:
            await self._over.wait()
        finally:
            self.end("cancelled")
            await owner.close()

    async def _read(self) -> None:
        try:
            while (frame := await self._call.read()) is not None:
                if self.ended:
                    return
                self._heard = True
                items = self._assembly.feed(*frame)
                if items:
                    self._receive(items)
            self.end("the peer closed the stream")
        except CALL_ERRORS as error:
            self.end(describe_error(error))
        except WireError as error:
            self.end(error.message)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while len(self._outbox):
                    await self._call.write(*self._outbox.take())
                    self._sent = True
                self._flushed.set()
                if self._beat:
                    self._beat = False
                    await self._call.write([], b"", False)
                    self._sent = True
        except CALL_ERRORS as error:
            self.end(describe_error(error))

    async def _tick(self) -> None:
        silent_ticks = 0
        while True:
            await asyncio.sleep(self._tick_s)
            silent_ticks = 0 if self._heard else silent_ticks + 1
            if silent_ticks >= self._max_silent_ticks:
                self.end(f"no frame for {silent_ticks * self._tick_s:g} s")
                return
            if not self._sent:
                self._beat = True
                self._wake.set()
            self._heard = self._sent = False


def describe_error(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or repr(error)


FrameT = TypeVar("FrameT")


def frame_or_none(frame: object, kind: type[FrameT]) -> FrameT | None:
    """What grpc.aio's `read` returned, or None for its EOF marker."""
    return frame if isinstance(frame, kind) else None
