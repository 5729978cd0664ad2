"""The least of a router: drives single requests over a harness's workers by hand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from tests.cluster_harness import FakeCluster, Node, Shape, WrapTransport, fake_cluster
from twostroke.cluster.core.ids import JobId, RequestId, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import (
    Ended,
    Lease,
    Leased,
    LoadReport,
    Outcome,
    RefusalReason,
    Refused,
    RouterMessage,
    Started,
    Stroke,
    Submit,
    Tokens,
)
from twostroke.cluster.core.sampling import SamplingParams

JobMessage = Leased | Refused | Started | Ended
M = TypeVar("M", Leased, Refused, Started, Ended)


class Driver:
    """A LinkListener that keeps everything it hears and can wait for it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.router = new_incarnation()
        self.links: dict[str, WorkerLink] = {}
        self.lost: list[str] = []
        self.loads: dict[str, LoadReport] = {}
        self._heard: list[tuple[str, JobMessage]] = []
        self._tokens: dict[tuple[RequestId, int], dict[int, int]] = {}
        self._news = asyncio.Event()
        self._next = 0

    async def attach(self, *nodes: Node) -> None:
        for node in nodes:
            self.links[node.info.worker_id] = await self.cluster.connect(node, self.router, self)

    def on_messages(self, link: WorkerLink, messages: Sequence[object]) -> None:
        worker = link.info.worker_id
        for message in messages:
            if isinstance(message, Tokens):
                self._take(message)
            elif isinstance(message, LoadReport):
                self.loads[worker] = message
            elif isinstance(message, Leased | Refused | Started | Ended):
                self._heard.append((worker, message))
        self._news.set()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.lost.append(link.info.worker_id)
        self._news.set()

    def _take(self, message: Tokens) -> None:
        """Tokens come by index, from any attempt; one that comes twice must be the same."""
        for run in message.runs:
            output = self._tokens.setdefault((run.job.request_id, run.job.choice), {})
            for index, token in enumerate(run.tokens, start=run.first_index):
                assert output.setdefault(index, token) == token, f"index {index} of {run.job} came out twice"

    def tokens(self, job: JobId) -> list[int]:
        output = self._tokens.get((job.request_id, job.choice), {})
        return [output[index] for index in range(len(output))]

    def send(self, node: Node, message: RouterMessage) -> None:
        self.links[node.info.worker_id].send([message])

    def submit(self, prompt: Sequence[int], num_tokens: int, stroke: Stroke = Stroke.RESERVE) -> Submit:
        self._next += 1
        job = JobId(RequestId(f"r{self._next}"), 0, 0)
        return Submit(job, stroke, tuple(prompt), (), SamplingParams(max_tokens=num_tokens), 60.0)

    def of(self, node: Node, job: JobId, kind: type[M]) -> list[M]:
        worker = node.info.worker_id
        return [
            message
            for who, message in self._heard
            if who == worker and isinstance(message, kind) and message.job == job
        ]

    async def news(self, timeout_s: float = 10.0) -> None:
        """Until the next message from anyone."""
        self._news.clear()
        async with asyncio.timeout(timeout_s):
            await self._news.wait()

    async def until(self, node: Node, job: JobId, kind: type[M], count: int = 1) -> M:
        """The `count`-th message of this kind about the job."""
        async with asyncio.timeout(10):
            while len(found := self.of(node, job, kind)) < count:
                await self.news()
        return found[count - 1]

    async def until_tokens(self, job: JobId, count: int) -> list[int]:
        async with asyncio.timeout(10):
            while len(tokens := self.tokens(job)) < count:
                await self.news()
        return tokens

    # ---------------------------------------------------------------------------------- whole lives

    async def reserve(self, submit: Submit, decode: Node) -> Lease:
        self.send(decode, submit)
        return (await self.until(decode, submit.job, Leased)).lease

    def prefill(self, submit: Submit, lease: Lease | None, prefill: Node) -> None:
        self.send(prefill, replace(submit, stroke=Stroke.PREFILL, lease=lease))

    async def generate(self, submit: Submit) -> list[int]:
        """On the first pair, without any trouble."""
        prefill, decode = self.cluster.prefill[0], self.cluster.decode[0]
        self.prefill(submit, await self.reserve(submit, decode), prefill)
        ends = [await self.until(node, submit.job, Ended) for node in (prefill, decode)]
        assert [end.outcome for end in ends] == [Outcome.HANDED_OVER, Outcome.FINISHED]
        assert ends[1].num_output == len(self.tokens(submit.job))
        return self.tokens(submit.job)

    async def generate_patiently(self, submit: Submit) -> list[int]:
        """On the first pair, asking again for pages and continuing after preemptions."""
        prefill, decode = self.cluster.prefill[0], self.cluster.decode[0]
        async with asyncio.timeout(60):
            while True:
                lease = await self._reserve_patiently(submit, decode)
                self.prefill(submit, lease, prefill)
                end = await self.until(decode, submit.job, Ended)
                await self.until(prefill, submit.job, Ended)
                if end.outcome is Outcome.FINISHED:
                    return self.tokens(submit.job)
                assert end.outcome is Outcome.PREEMPTED, end
                job = submit.job._replace(attempt=submit.job.attempt + 1)
                submit = replace(submit, job=job, delivered=tuple(self.tokens(job)))

    async def _reserve_patiently(self, submit: Submit, decode: Node) -> Lease:
        refusals = 0
        while True:
            self.send(decode, submit)
            while not self.of(decode, submit.job, Leased):
                if len(found := self.of(decode, submit.job, Refused)) > refusals:
                    break
                await self.news()
            else:
                return self.of(decode, submit.job, Leased)[0].lease
            refusals = len(found)
            assert found[-1].reason is RefusalReason.NO_PAGES, found[-1]
            await self.news()


@asynccontextmanager
async def driven(shape: Shape, wrap: WrapTransport = lambda transport: transport) -> AsyncIterator[Driver]:
    """A driver attached to every worker of a fake cluster."""
    async with fake_cluster(shape, wrap) as cluster:
        driver = Driver(cluster)
        await driver.attach(*cluster.nodes)
        yield driver


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 37 + index * 11) % 1000 for index in range(length)]
