"""A worker app without an engine: it answers each Submit by giving the prompt back as output, one token a message.

`python -m tests.echo_app` serves it on a free port, prints the port and runs until it is killed.
"""

import asyncio
from collections.abc import Sequence

import grpc.aio

from twostroke.cluster.attach import AttachServicer
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId, PrefixKey, RequestId, WorkerId, new_incarnation
from twostroke.cluster.core.layout import gqa_layout
from twostroke.cluster.core.link import Outlet, WorkerLink, WorkerSession
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    Ledger,
    LoadReport,
    Outcome,
    RefusalReason,
    Refused,
    Role,
    RouterMessage,
    Started,
    Submit,
    TokenRun,
    Tokens,
    WorkerCheck,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.stream import DEFAULT_TIMING, Timing
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server

LAYOUT = gqa_layout(model_fingerprint="fake", layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=16)


class EchoSession:
    def __init__(self, app: "EchoApp", outlet: Outlet) -> None:
        self._app = app
        self.outlet = outlet
        self.received: list[RouterMessage] = []
        self.closes: list[str] = []
        self.closed_event = asyncio.Event()

    def receive(self, messages: Sequence[RouterMessage]) -> None:
        assert not self.closes
        self.received.extend(messages)
        for message in messages:
            if isinstance(message, Submit):
                self.outlet.deliver(self._app.answer(message))
            elif isinstance(message, Cancel):
                self.outlet.deliver([Ended(message.job, Outcome.CANCELLED)])

    def closed(self, reason: str) -> None:
        self.closes.append(reason)
        self.closed_event.set()


class EchoApp:
    """`max_tokens == 0` holds the job until it is cancelled."""

    def __init__(self) -> None:
        self.sessions: dict[Incarnation, list[EchoSession]] = {}
        self.keys: tuple[PrefixKey, ...] = ()
        self.info = WorkerInfo(
            worker_id=WorkerId("decode-0"),
            incarnation=new_incarnation(),
            role=Role.DECODE,
            address="127.0.0.1:0",
            model="echo",
            layout=LAYOUT,
            num_pages=8,
            max_context=128,
            chunk_tokens=16,
            transports=("grpc",),
        )

    def attach(self, router: Incarnation, outlet: Outlet) -> WorkerSession:
        session = EchoSession(self, outlet)
        self.sessions.setdefault(router, []).append(session)
        return session

    def answer(self, submit: Submit) -> list[WorkerMessage]:
        if not submit.prompt:
            return [Refused(submit.job, RefusalReason.BAD_SUBMIT, "an empty prompt")]
        if submit.sampling.max_tokens == 0:
            return [Started(submit.job, 0)]
        runs = [Tokens((TokenRun(submit.job, index, (token,)),)) for index, token in enumerate(submit.prompt)]
        end = Ended(submit.job, Outcome.FINISHED, FinishReason.LENGTH, len(submit.prompt))
        return [Started(submit.job, 0), *runs, end]

    async def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot(self.info.incarnation, 7, self.keys)

    async def check(self) -> WorkerCheck:
        ledger = Ledger(free=self.info.num_pages, cached=0, active=0, leased=0, quarantined=0)
        return WorkerCheck(LoadReport(ledger, 0, 0, 0, 0, 0.0, 0, 0, False), "one page is missing", 3)

    async def drain(self, timeout_s: float) -> bool:
        return timeout_s > 1


class Recorder:
    """A LinkListener that keeps everything and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[WorkerMessage] = []
        self.losses: list[str] = []
        self.lost = asyncio.Event()
        self._news = asyncio.Event()

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        assert not self.losses, "a message after on_lost"
        self.messages.extend(messages)
        self._news.set()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.losses.append(reason)
        self.lost.set()

    async def until_ended(self, num_jobs: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while sum(isinstance(message, Ended | Refused) for message in self.messages) < num_jobs:
                self._news.clear()
                await self._news.wait()

    def tokens_of(self, job: JobId) -> list[int]:
        """Output tokens in arrival order; fails when an index is out of order."""
        tokens: list[int] = []
        for message in self.messages:
            if isinstance(message, Tokens):
                for run in message.runs:
                    if run.job == job:
                        assert run.first_index == len(tokens)
                        tokens.extend(run.tokens)
        return tokens


def job(number: int) -> JobId:
    return JobId(RequestId(f"request-{number}"), 0, 0)


async def serve(app: EchoApp, timing: Timing = DEFAULT_TIMING) -> tuple[grpc.aio.Server, AttachServicer, int]:
    server = new_server()
    servicer = AttachServicer(app, timing)
    add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    return server, servicer, port


async def main() -> None:
    server, _, port = await serve(EchoApp())
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
