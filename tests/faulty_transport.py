"""A transport around another that does what a script says before each call: wait, fail, or pass."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import OnAccepted, Shipment, TransferStats, Transport, unheard

Script = Callable[[str], Awaitable[None]]
"""Called with `open`, `push`, `commit` or `abort` before the real call."""


class FaultyTransport:
    def __init__(self, inner: Transport, script: Script) -> None:
        self._inner = inner
        self._script = script

    @property
    def name(self) -> str:
        return self._inner.name

    async def open(self, lease: Lease, on_accepted: OnAccepted = unheard) -> Shipment:
        await self._script("open")
        return _FaultyShipment(await self._inner.open(lease, on_accepted), self._script)

    async def close(self) -> None:
        await self._inner.close()


class _FaultyShipment:
    def __init__(self, inner: Shipment, script: Script) -> None:
        self._inner = inner
        self._script = script

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        await self._script("push")
        await self._inner.push(first, pages)

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        await self._script("commit")
        return await self._inner.commit(first_token, first_token_index, first_logprob)

    async def abort(self, reason: str) -> None:
        await self._script("abort")
        await self._inner.abort(reason)


class Stopper:
    """Stops every call of one kind until released; `reached` says that one has arrived there."""

    def __init__(self, where: str, frozen: bool = False) -> None:
        self._where = where
        self._frozen = frozen
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def __call__(self, where: str) -> None:
        if where == self._where and not self.released.is_set():
            self.reached.set()
            if self._frozen:
                await self._freeze()
            else:
                await self.released.wait()

    async def _freeze(self) -> None:
        """As a stopped process: not even a cancellation gets through before the release."""
        cancelled = False
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


class Failer:
    """Fails the first `times` calls of one kind."""

    def __init__(self, where: str, times: int = 1) -> None:
        self._where = where
        self.left = times

    async def __call__(self, where: str) -> None:
        if where == self._where and self.left > 0:
            self.left -= 1
            raise TransferFailed(f"{where} fails as told")
