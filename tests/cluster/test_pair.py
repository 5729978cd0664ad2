"""One prefill and one decode worker, whole requests through both, over direct and over gRPC links."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from tests.cluster_harness import FakeCluster, Node, Shape, fake_cluster
from twostroke.cluster.core.ids import JobId, RequestId, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import (
    Ended,
    Lease,
    Leased,
    LoadReport,
    Outcome,
    RouterMessage,
    Started,
    Stroke,
    Submit,
    Tokens,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.fake_executor import golden

M = TypeVar("M", bound=WorkerMessage)
LINKS = ["direct", "grpc"]


class Driver:
    """The least of a router: drives single requests by hand, strictly by output index."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.router = new_incarnation()
        self.links: dict[str, WorkerLink] = {}
        self.heard: list[tuple[str, WorkerMessage]] = []
        self.lost: list[str] = []
        self._news = asyncio.Event()
        self._next = 0

    async def attach(self, *nodes: Node) -> None:
        for node in nodes:
            self.links[node.info.worker_id] = await self.cluster.connect(node, self.router, self)

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        self.heard.extend((link.info.worker_id, message) for message in messages)
        self._news.set()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.lost.append(link.info.worker_id)
        self._news.set()

    def send(self, node: Node, message: RouterMessage) -> None:
        self.links[node.info.worker_id].send([message])

    def submit(self, prompt: Sequence[int], num_tokens: int, stroke: Stroke = Stroke.RESERVE) -> Submit:
        self._next += 1
        job = JobId(RequestId(f"r{self._next}"), 0, 0)
        return Submit(job, stroke, tuple(prompt), (), SamplingParams(max_tokens=num_tokens), 30.0)

    def of(self, node: Node, job: JobId, kind: type[M]) -> list[M]:
        return [
            message
            for worker, message in self.heard
            if worker == node.info.worker_id
            and isinstance(message, kind)
            and not isinstance(message, LoadReport | Tokens)
            and message.job == job
        ]

    async def until(self, node: Node, job: JobId, kind: type[M], count: int = 1, timeout_s: float = 10.0) -> M:
        """The `count`-th message of this kind about the job."""
        async with asyncio.timeout(timeout_s):
            while len(found := self.of(node, job, kind)) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def until_tokens(self, job: JobId, count: int, timeout_s: float = 10.0) -> list[int]:
        async with asyncio.timeout(timeout_s):
            while len(tokens := self.tokens(job)) < count:
                self._news.clear()
                await self._news.wait()
        return tokens

    def tokens(self, job: JobId) -> list[int]:
        """Output by index from both workers; a token that comes twice must be the same."""
        by_index: dict[int, int] = {}
        for _, message in self.heard:
            if isinstance(message, Tokens):
                for run in message.runs:
                    if run.job == job:
                        for index, token in enumerate(run.tokens, start=run.first_index):
                            assert by_index.setdefault(index, token) == token
        return [by_index[index] for index in range(len(by_index))]

    async def reserve(self, submit: Submit, decode: Node) -> Lease:
        self.send(decode, submit)
        return (await self.until(decode, submit.job, Leased)).lease

    def prefill(self, submit: Submit, lease: Lease | None, prefill: Node) -> None:
        self.send(prefill, replace(submit, stroke=Stroke.PREFILL, lease=lease))

    async def generate(self, submit: Submit) -> list[int]:
        """The whole life on the cluster's first pair."""
        prefill, decode = self.cluster.prefill[0], self.cluster.decode[0]
        self.prefill(submit, await self.reserve(submit, decode), prefill)
        ends = [await self.until(node, submit.job, Ended) for node in (prefill, decode)]
        assert [end.outcome for end in ends] == [Outcome.HANDED_OVER, Outcome.FINISHED]
        assert ends[1].num_output == len(self.tokens(submit.job))
        return self.tokens(submit.job)


@asynccontextmanager
async def driven(shape: Shape, **options: object) -> AsyncIterator[Driver]:
    async with fake_cluster(shape, **options) as cluster:  # type: ignore[arg-type]
        driver = Driver(cluster)
        await driver.attach(*cluster.nodes)
        yield driver


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 37 + index * 11) % 1000 for index in range(length)]


# ----------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
async def test_ragged_prompts_give_the_golden_answer(links: str, page_size: int, chunk: int) -> None:
    shape = Shape(links=links, page_size=page_size, num_pages=2048 // page_size, prefill_chunk=chunk)  # type: ignore[arg-type]
    async with driven(shape) as driver:
        lengths = [1, 2, page_size, page_size + 1, 2 * page_size, 15, 16, 17, 33, 50]
        submits = [
            driver.submit(prompt(max(1, length), number), 2 + number) for number, length in enumerate(lengths, start=1)
        ]
        answers = await asyncio.gather(*(driver.generate(submit) for submit in submits))
        for submit, answer in zip(submits, answers, strict=True):
            assert answer == golden(submit.prompt, submit.sampling.max_tokens, 1000)


@pytest.mark.parametrize("links", LINKS)
async def test_one_token_needs_no_lease(links: str) -> None:
    async with driven(Shape(links=links)) as driver:  # type: ignore[arg-type]
        prefill = driver.cluster.prefill[0]
        submit = driver.submit(prompt(10), 1)
        driver.prefill(submit, None, prefill)
        end = await driver.until(prefill, submit.job, Ended)
        assert end.outcome is Outcome.FINISHED
        assert driver.tokens(submit.job) == golden(submit.prompt, 1, 1000)


async def test_pages_that_the_decode_side_holds_are_not_sent() -> None:
    async with driven(Shape(page_size=4)) as driver:
        first = driver.submit(prompt(32), 4)
        await driver.generate(first)
        again = driver.submit(prompt(32), 4)
        assert await driver.generate(again) == golden(again.prompt, 4, 1000)
        end = await driver.until(driver.cluster.prefill[0], again.job, Ended)
        lease = driver.of(driver.cluster.decode[0], again.job, Leased)[0].lease
        assert lease.num_held == 7
        assert end.timings.pages_shipped == 1
        assert (await driver.until(driver.cluster.decode[0], again.job, Started)).cached_tokens == 28


async def test_local_prefill_gives_the_golden_answer() -> None:
    async with driven(Shape(prefill=0)) as driver:
        decode = driver.cluster.decode[0]
        submit = driver.submit(prompt(50), 9, Stroke.LOCAL)
        driver.send(decode, submit)
        await driver.until(decode, submit.job, Ended)
        assert driver.tokens(submit.job) == golden(submit.prompt, 9, 1000)
