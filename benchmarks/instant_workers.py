"""A prefill and a decode worker that compute nothing, so that what is measured is the router.

They speak the attached stream as real ones do (leases, hand-over, tokens step by step) and send no page. Every output
token is `token`. A step gives each running job one, when `may_step` allows it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import grpc.aio

from benchmarks.bare_worker import LAYOUT, BareWorker
from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.attach import AttachServicer
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, WorkerId, new_incarnation
from twostroke.cluster.core.link import Outlet
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    Lease,
    Leased,
    LeaseShard,
    Outcome,
    Role,
    RouterMessage,
    Started,
    Stroke,
    Submit,
    TokenRun,
    Tokens,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server

MAX_CONTEXT = 1 << 17
FREE_S = 10.0
STEP_S = 0.001
"""Between two steps. Without it each step has the tokens of the few jobs that came since the last, and the router reads
many small frames, which no real worker sends.
"""


class _Worker(BareWorker, ABC):
    """Implements `WorkerApp` and its one session, as far as a router asks."""

    def __init__(self, role: Role) -> None:
        super().__init__(
            WorkerInfo(
                worker_id=WorkerId(f"{role.value}-0"),
                incarnation=new_incarnation(),
                role=role,
                address="",
                model="instant",
                layout=LAYOUT,
                num_pages=1 << 20,
                max_context=MAX_CONTEXT,
                chunk_tokens=4096,
                transports=("grpc",),
            )
        )
        self._outlet: Outlet | None = None
        self.free = asyncio.Event()
        """Nobody is attached."""

    def attach(self, router: Incarnation, outlet: Outlet) -> "_Worker":
        self._outlet = outlet
        self.free.clear()
        return self

    def receive(self, messages: Sequence[RouterMessage]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.submitted(message)
            elif isinstance(message, Cancel):
                self.cancelled(message.job)

    @abstractmethod
    def submitted(self, submit: Submit) -> None: ...

    @abstractmethod
    def cancelled(self, job: JobId) -> None: ...

    def closed(self, reason: str) -> None:
        self._outlet = None
        self.free.set()

    def say(self, *messages: WorkerMessage) -> None:
        if self._outlet is not None:
            self._outlet.deliver(messages)


class DecodeWorker(_Worker):
    def __init__(self, token: int, may_step: Callable[[int], bool], news: asyncio.Event) -> None:
        """`may_step(n)`: another `n` tokens may go out. `news` is set when its answer may have changed."""
        super().__init__(Role.DECODE)
        self._token = token
        self._may_step = may_step
        self._news = news
        self._leased: dict[JobId, Submit] = {}
        self._running: dict[JobId, tuple[int, int]] = {}
        """Of each job the next output index, and its `max_tokens`."""
        self._new: list[Started] = []
        """Told with the next step, before which an engine does not look at what came."""

    def submitted(self, submit: Submit) -> None:
        if submit.stroke is Stroke.LOCAL:
            self._new.append(Started(submit.job, 0))
            self._start(submit, 0)
            return
        self._leased[submit.job] = submit
        pages = tuple(PageId(number) for number in range(-(-(len(submit.prompt) + 1) // LAYOUT.page_size)))
        info = self.info
        shard = LeaseShard(0, info.address, 0, 1, pages)
        lease = Lease(
            lease_id=LeaseId(str(submit.job)),
            job=submit.job,
            epoch=0,
            nonce=b"nonce",
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            layout=LAYOUT,
            transports=info.transports,
            device="cpu",
            num_held=0,
            shards=(shard,),
            ttl_s=30.0,
        )
        self.say(Leased(submit.job, lease))

    def committed(self, job: JobId) -> None:
        """The prefill worker has handed over, with the first token."""
        submit = self._leased.pop(job, None)
        if submit is not None:
            self.say(Started(job, 0, self._token))
            self._start(submit, 1)

    def _start(self, submit: Submit, index: int) -> None:
        self._running[submit.job] = (index, submit.sampling.max_tokens)
        self._news.set()

    def cancelled(self, job: JobId) -> None:
        if self._leased.pop(job, None) is not None or self._running.pop(job, None) is not None:
            self.say(Ended(job, Outcome.CANCELLED))

    async def run(self) -> None:
        while True:
            while self._running and self._may_step(len(self._running)):
                self._step()
                await asyncio.sleep(STEP_S)
            self._news.clear()
            await self._news.wait()

    def _step(self) -> None:
        runs: list[TokenRun] = []
        ends: list[Ended] = []
        for job, (index, most) in list(self._running.items()):
            runs.append(TokenRun(job, index, (self._token,)))
            if index + 1 == most:
                del self._running[job]
                ends.append(Ended(job, Outcome.FINISHED, FinishReason.LENGTH, most))
            else:
                self._running[job] = (index + 1, most)
        new, self._new = self._new, []
        self.say(*new, Tokens(tuple(runs)), *ends)


class PrefillWorker(_Worker):
    def __init__(self, token: int, decode: DecodeWorker) -> None:
        super().__init__(Role.PREFILL)
        self._token = token
        self._decode = decode

    def submitted(self, submit: Submit) -> None:
        begun, first = Started(submit.job, 0), Tokens((TokenRun(submit.job, 0, (self._token,)),))
        if submit.lease is None:
            self.say(begun, first, Ended(submit.job, Outcome.FINISHED, FinishReason.LENGTH, 1))
            return
        self.say(begun, first, Ended(submit.job, Outcome.HANDED_OVER))
        self._decode.committed(submit.job)

    def cancelled(self, job: JobId) -> None:
        """It ended when it came."""


class InstantWorkers:
    """Both of them, each on a port of its own. `open` once, `close` once."""

    def __init__(self, token: int, may_step: Callable[[int], bool], news: asyncio.Event) -> None:
        self.decode = DecodeWorker(token, may_step, news)
        self._apps = [PrefillWorker(token, self.decode), self.decode]
        self._servers: list[grpc.aio.Server] = []
        self._servicers: list[AttachServicer] = []
        self._tasks = TaskOwner("instant")

    async def open(self) -> list[str]:
        """Their addresses."""
        addresses = []
        for app in self._apps:
            server, servicer = new_server(), AttachServicer(app)
            add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            addresses.append(f"127.0.0.1:{bind(server, '127.0.0.1', 0)}")
            await server.start()
            self._servers.append(server)
            self._servicers.append(servicer)
        self._tasks.spawn(self.decode.run(), "decode")
        return addresses

    async def wait_free(self) -> None:
        """Until the last one to attach has gone. Raises TimeoutError."""
        async with asyncio.timeout(FREE_S):
            for app in self._apps:
                await app.free.wait()

    async def close(self) -> None:
        for servicer, server in zip(self._servicers, self._servers, strict=True):
            await servicer.close("the benchmark is over")
            await server.stop(0)
        await self._tasks.close()
