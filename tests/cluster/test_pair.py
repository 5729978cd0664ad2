"""One prefill and one decode worker: whole requests through both, over direct and over gRPC links."""

import asyncio
import threading
from typing import Literal

import pytest

from tests.cluster_harness import Shape, fake_cluster
from tests.pair_driver import driven, prompt
from twostroke.cluster.core.messages import Ended, Leased, Outcome, RefusalReason, Refused, Started, Stroke
from twostroke.engine.fake_executor import FakeExecutor, FakeHandle, golden
from twostroke.engine.plan import Plan

Links = Literal["direct", "grpc"]
LINKS: list[Links] = ["direct", "grpc"]


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
async def test_ragged_prompts_give_the_golden_answer(links: Links, page_size: int, chunk: int) -> None:
    shape = Shape(links=links, page_size=page_size, num_pages=2048 // page_size, prefill_chunk=chunk)
    async with driven(shape) as driver:
        lengths = [1, 2, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size, 15, 16, 17, 33, 50]
        submits = [driver.submit(prompt(length, number), 2 + number) for number, length in enumerate(lengths, start=1)]
        answers = await asyncio.gather(*(driver.generate(submit) for submit in submits))
        for submit, answer in zip(submits, answers, strict=True):
            assert answer == golden(submit.prompt, submit.sampling.max_tokens, 1000)


@pytest.mark.parametrize("page_size", [1, 16])
async def test_pages_over_torch_distributed_give_the_golden_answer(page_size: int) -> None:
    shape = Shape(links="grpc", collective=True, decode=2, page_size=page_size, num_pages=2048 // page_size)
    async with driven(shape) as driver:
        lengths = [1, page_size, page_size + 1, 33, 50, 300]
        submits = [driver.submit(prompt(length, number), 2 + number) for number, length in enumerate(lengths, start=1)]
        answers = await asyncio.gather(*(driver.generate(submit) for submit in submits))
        for submit, answer in zip(submits, answers, strict=True):
            assert answer == golden(submit.prompt, submit.sampling.max_tokens, 1000)


@pytest.mark.parametrize("links", LINKS)
async def test_one_token_needs_no_lease(links: Links) -> None:
    async with driven(Shape(links=links)) as driver:
        prefill = driver.cluster.prefill[0]
        submit = driver.submit(prompt(10), 1)
        driver.prefill(submit, None, prefill)
        end = await driver.until(prefill, submit.job, Ended)
        assert end.outcome is Outcome.FINISHED
        assert driver.tokens(submit.job) == golden(submit.prompt, 1, 1000)


@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_pages_that_the_decode_side_holds_are_not_sent(page_size: int) -> None:
    async with driven(Shape(page_size=page_size)) as driver:
        prefill, decode = driver.cluster.prefill[0], driver.cluster.decode[0]
        await driver.generate(driver.submit(prompt(32), 4))
        again = driver.submit(prompt(32), 4)
        assert await driver.generate(again) == golden(again.prompt, 4, 1000)

        num_pages = 32 // page_size
        assert driver.of(decode, again.job, Leased)[0].lease.num_held == num_pages - 1
        end = driver.of(prefill, again.job, Ended)[0]
        assert end.timings.pages_shipped == 1
        assert driver.of(decode, again.job, Started)[0].cached_tokens == 32 - page_size


async def test_local_prefill_gives_the_golden_answer() -> None:
    async with driven(Shape(prefill=0)) as driver:
        decode = driver.cluster.decode[0]
        submit = driver.submit(prompt(50), 9, Stroke.LOCAL)
        driver.send(decode, submit)
        await driver.until(decode, submit.job, Ended)
        assert driver.tokens(submit.job) == golden(submit.prompt, 9, 1000)


@pytest.mark.parametrize("links", LINKS)
async def test_tight_pools_serve_everyone_in_the_end(links: Links) -> None:
    shape = Shape(links=links, page_size=4, num_pages=48, decode_pages=24, prefill_chunk=8)
    async with driven(shape) as driver:
        submits = [driver.submit(prompt(9 + 3 * number, number), 30) for number in range(10)]
        answers = await asyncio.gather(*(driver.generate_patiently(submit) for submit in submits))
        for submit, answer in zip(submits, answers, strict=True):
            assert answer == golden(submit.prompt, 30, 1000)


async def test_a_drained_worker_refuses_and_finishes() -> None:
    async with driven(Shape(step_delay_s=0.005)) as driver:
        decode = driver.cluster.decode[0]
        running = driver.submit(prompt(10), 40, Stroke.LOCAL)
        driver.send(decode, running)
        await driver.until_tokens(running.job, 2)
        drained = asyncio.create_task(decode.host.drain(10.0))
        while not driver.loads[decode.info.worker_id].draining:
            await driver.news()
        late = driver.submit(prompt(10), 4, Stroke.LOCAL)
        driver.send(decode, late)
        assert (await driver.until(decode, late.job, Refused)).reason is RefusalReason.DRAINING
        assert await drained
        assert (await driver.until(decode, running.job, Ended)).outcome is Outcome.FINISHED
        assert driver.tokens(running.job) == golden(running.prompt, 40, 1000)
        assert decode.host.health() == "draining"


async def test_a_worker_is_healthy_once_it_has_run_a_step() -> None:
    gate = threading.Event()

    class Slow(FakeExecutor):
        def launch(self, plan: Plan) -> FakeHandle:
            assert gate.wait(10.0)
            return super().launch(plan)

    async with fake_cluster(Shape(prefill=0), make_executor=lambda pages: Slow(pages, 4, 1000, 4096)) as cluster:
        host = cluster.decode[0].host
        assert host.health() == "warming up"
        gate.set()
        await asyncio.wait_for(host.warm.wait(), 10.0)
        assert host.health() == ""


@pytest.mark.parametrize("links", LINKS)
async def test_a_snapshot_agrees_with_the_published_batches(links: Links) -> None:
    async with driven(Shape(links=links, num_pages=24)) as driver:
        for number in range(6):
            await driver.generate(driver.submit(prompt(20, number), 4))
        for node in driver.cluster.nodes:
            snapshot = await node.host.snapshot()
            named: set[bytes] = set()
            for batch in node.batches:
                if batch.sequence <= snapshot.sequence:
                    named = (named - set(batch.removed)) | set(batch.stored)
            assert named == set(snapshot.keys)
            assert [batch.sequence for batch in node.batches] == list(range(1, len(node.batches) + 1))
