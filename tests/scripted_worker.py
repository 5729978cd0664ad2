"""A worker that says only what the test tells it to: for orders of messages that real workers produce rarely."""

import asyncio
from collections.abc import Sequence

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId
from twostroke.cluster.core.link import DirectLink, LinkListener, Outlet
from twostroke.cluster.core.messages import (
    Lease,
    Leased,
    LeaseShard,
    Ledger,
    LoadReport,
    RouterMessage,
    Submit,
    TokenRun,
    Tokens,
    WorkerCheck,
    WorkerInfo,
    WorkerMessage,
)

TIMEOUT_S = 5.0


class ScriptedWorker:
    """Implements `core.link.WorkerApp` and its session for one router."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self.heard: list[RouterMessage] = []
        self._outlet: Outlet | None = None
        self._news = asyncio.Event()

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def attach(self, router: Incarnation, outlet: Outlet) -> "ScriptedWorker":
        self._outlet = outlet
        return self

    async def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot(self._info.incarnation, 0, ())

    async def check(self) -> WorkerCheck:
        return WorkerCheck(self.load(), "", 0)

    async def drain(self, timeout_s: float) -> bool:
        return True

    def receive(self, messages: Sequence[RouterMessage]) -> None:
        self.heard += messages
        self._news.set()

    def closed(self, reason: str) -> None:
        self._news.set()

    def link(self, listener: LinkListener) -> DirectLink:
        return DirectLink(self, Incarnation("router"), listener, asyncio.get_running_loop().call_soon)

    # --------------------------------------------------------------------------------------- the script

    async def hear(self, kind: type[RouterMessage], count: int = 1) -> RouterMessage:
        """The `count`-th message of this kind."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(found := [message for message in self.heard if isinstance(message, kind)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def submitted(self, count: int = 1) -> Submit:
        message = await self.hear(Submit, count)
        assert isinstance(message, Submit)
        return message

    async def say(self, *messages: WorkerMessage) -> None:
        """Deliver, and let the router take it in."""
        assert self._outlet is not None
        self._outlet.deliver(messages)
        for _ in range(3):
            await asyncio.sleep(0)

    async def say_tokens(self, job: JobId, first: int, *tokens: int) -> None:
        await self.say(Tokens((TokenRun(job, first, tokens),)))

    def lease(self, job: JobId, epoch: int = 0) -> Leased:
        info = self._info
        shard = LeaseShard(0, info.address, 0, 1, (PageId(0),))
        lease = Lease(
            LeaseId("l"), job, epoch, b"n", info.worker_id, info.incarnation, info.layout, info.transports, "cpu", 0,
            (shard,), 30.0,
        )  # fmt: skip
        return Leased(job, lease)

    def load(self, *, running: int = 0, step_age_s: float = 0.0, draining: bool = False) -> LoadReport:
        ledger = Ledger(free=self._info.num_pages, cached=0, active=0, leased=0, quarantined=0)
        return LoadReport(ledger, running, 0, 0, 0, step_age_s, 0, 0, draining)
