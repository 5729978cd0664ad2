"""A limit on how long a client may take for one send of many, watched by one timer.

`asyncio.timeout` around each send puts a timer into the loop's heap and takes it out again, for every token of every
stream. Here the timer looks once in `limit_s` whether a send is stuck since then; so one is given up after `limit_s` to
twice that.
"""

import asyncio
from types import TracebackType

from starlette.types import Message, Send


class SendLimit:
    """`async with SendLimit(send, limit_s) as out: await out.send(...)`. A stuck send ends the block: TimeoutError."""

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)
        self._block = asyncio.timeout(None)

    async def __aenter__(self) -> "SendLimit":
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._block.__aexit__(kind, error, traceback)

    async def send(self, message: Message) -> None:
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._sending_since is not None and now - self._sending_since >= self._limit_s:
            self._block.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s, self._look)
