"""Orders of messages between the dispatcher and two scripted workers: races that must end the same way."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.routed_cluster import Answer, NumberText, read
from tests.router_builders import worker_info
from tests.scripted_worker import ScriptedWorker
from tests.waiting import until
from twostroke.cluster.config import PolicySection, RouterSection
from twostroke.cluster.core.errors import Cancelled, ContextOverflow, InternalError
from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.link import DirectLink
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    JobTimings,
    Outcome,
    RefusalReason,
    Refused,
    RenewLease,
    Started,
    Stroke,
    Submit,
    TokenRun,
    Tokens,
)
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.dispatcher import Dispatcher
from twostroke.router.record import ChoiceRecord, RequestRecord
from twostroke.router.request import GenerateRequest

PROMPT = tuple(range(30))


@dataclass
class Scene:
    dispatcher: Dispatcher
    workers: dict[str, ScriptedWorker]
    links: dict[str, DirectLink]
    registry: CollectorRegistry

    def submit(self, max_tokens: int = 4, **changes: Any) -> "asyncio.Task[Answer]":
        request = GenerateRequest(
            RequestId("r"), "fake", PROMPT, SamplingParams(max_tokens=max_tokens), 10.0, **changes
        )
        return asyncio.create_task(read(self.dispatcher.submit(request)))

    async def leased(self, number: int = 1) -> JobId:
        """Through reservation: the prefill worker has been asked."""
        job = (await self.workers["decode-0"].submitted(number)).job
        await self.workers["decode-0"].say(self.workers["decode-0"].lease(job))
        await self.workers["prefill-0"].submitted(number)
        return job

    def dropped(self, reason: str) -> float:
        labels = {"model_name": "fake", "engine": "router", "reason": reason}
        return self.registry.get_sample_value("twostroke_dropped_messages_total", labels) or 0.0


@asynccontextmanager
async def scene(*names: str) -> AsyncIterator[Scene]:
    registry = CollectorRegistry()
    config = RouterSection(policy=PolicySection(local_threshold_tokens=0))
    dispatcher = Dispatcher(config, NumberText, RouterMetrics(registry, "fake"))
    workers = {name: ScriptedWorker(worker_info(name)) for name in names or ("prefill-0", "decode-0")}
    links = {name: worker.link(dispatcher) for name, worker in workers.items()}
    for link in links.values():
        assert dispatcher.attach(link)
    yield Scene(dispatcher, workers, links, registry)
    assert await dispatcher.drain(2.0)
    dispatcher.check_integrity()
    assert all(not worker.charges for worker in dispatcher.fleet.workers())
    await dispatcher.close()


def finished(job: JobId, num_output: int = 4) -> Ended:
    return Ended(job, Outcome.FINISHED, FinishReason.LENGTH, num_output)


def handed_over(job: JobId) -> Ended:
    return Ended(job, Outcome.HANDED_OVER, timings=JobTimings(cached_tokens=8, transport="grpc"))


@pytest.mark.parametrize("turns", sorted({"".join(turns) for turns in permutations("PPDDD")}))
async def test_the_two_streams_may_interleave_anyhow(turns: str) -> None:
    """Whose message comes next; within a stream the order is kept."""
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        first, later = (Tokens((TokenRun(job, 0, (100,)),)), Tokens((TokenRun(job, 1, (101, 102, 103)),)))
        of_prefill = iter([(Started(job, 8), first), (handed_over(job),)])
        of_decode = iter([Started(job, 0, 100), later, finished(job)])
        for turn in turns:
            if turn == "P":
                await prefill.say(*next(of_prefill))
            else:
                await decode.say(next(of_decode))
        result = await answer
        assert result.tokens[0] == [100, 101, 102, 103]
        assert result.usage.cached_tokens == 8
        assert result.usage.attempts == 1


async def test_a_prefill_worker_lost_before_its_token_is_replaced_under_a_higher_epoch() -> None:
    async with scene("prefill-0", "prefill-1", "decode-0") as stage:
        answer = stage.submit()
        decode = stage.workers["decode-0"]
        job, other = await lost_before_its_token(stage)
        assert await decode.hear(RenewLease) == RenewLease(job, bump_epoch=True)
        await decode.say(decode.lease(job, epoch=1))
        again = await other.submitted()
        assert again.lease is not None
        assert (again.job, again.lease.epoch, again.delivered) == (job, 1, ())
        await other.say_tokens(job, 0, 100)
        await other.say(handed_over(job))
        await decode.say(Started(job, 0, 100))
        await decode.say_tokens(job, 1, 101, 102, 103)
        await decode.say(finished(job))
        assert (await answer).usage.attempts == 2


async def lost_before_its_token(stage: Scene) -> tuple[JobId, ScriptedWorker]:
    """A lease, and the prefill worker that fills it is gone: the renewal is on its way. Also the worker left over."""
    decode = stage.workers["decode-0"]
    job = (await decode.submitted()).job
    await decode.say(decode.lease(job))
    await until(lambda: any(stage.workers[name].heard for name in ("prefill-0", "prefill-1")))
    first, second = ("prefill-0", "prefill-1") if stage.workers["prefill-0"].heard else ("prefill-1", "prefill-0")
    stage.links[first].cut("killed")
    await decode.hear(RenewLease)
    return job, stage.workers[second]


async def test_a_commit_that_overtakes_the_renewal_is_carried_on() -> None:
    """The first token was lost with the prefill worker; the decode worker has it from the commit."""
    async with scene("prefill-0", "prefill-1", "decode-0") as stage:
        answer = stage.submit()
        decode = stage.workers["decode-0"]
        job, other = await lost_before_its_token(stage)
        await decode.say(Started(job, 0, 100))
        await decode.say_tokens(job, 1, 101, 102, 103)
        await decode.say(finished(job))
        assert (await answer).tokens[0] == [100, 101, 102, 103]
        assert other.heard == []
        assert [type(message) for message in decode.heard] == [Submit, RenewLease]


@pytest.mark.parametrize("way", ["failed", "lost", "cancelled"])
async def test_a_second_prefill_worker_that_is_too_late_ends_nothing(way: str) -> None:
    """The commit of the first was accepted: what becomes of the second before its token came does not matter."""
    async with scene("prefill-0", "prefill-1", "decode-0") as stage:
        answer = stage.submit()
        decode = stage.workers["decode-0"]
        job, other = await lost_before_its_token(stage)
        await decode.say(decode.lease(job, epoch=1))
        await other.submitted()
        await decode.say(Started(job, 0, 100))
        if way == "lost":
            stage.links[other.info.worker_id].cut("killed")
        else:
            outcome = Outcome.TRANSFER_FAILED if way == "failed" else Outcome.CANCELLED
            await other.say(Ended(job, outcome, message="the lease is committed"))
        await decode.say_tokens(job, 1, 101, 102, 103)
        await decode.say(finished(job))
        result = await answer
        assert result.tokens[0] == [100, 101, 102, 103]
        assert result.usage.attempts == 2
        assert [type(message) for message in decode.heard] == [Submit, RenewLease]


async def test_a_first_token_that_differs_from_the_committed_one_fails_the_attempt() -> None:
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        await prefill.say_tokens(job, 0, 100)
        await decode.say(Started(job, 0, 999))
        again = await decode.submitted(2)
        assert again.delivered == (100,)
        await decode.say(decode.lease(again.job))
        await prefill.submitted(2)
        await decode.say(Started(again.job, 0, 101))
        await decode.say_tokens(again.job, 2, 102, 103)
        await prefill.say(handed_over(again.job))
        await decode.say(finished(again.job))
        assert (await answer).tokens[0] == [100, 101, 102, 103]


async def test_a_contradicting_token_fails_the_attempt_and_old_messages_are_dropped() -> None:
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        await prefill.say_tokens(job, 0, 100)
        await decode.say(Started(job, 0))
        await decode.say_tokens(job, 0, 999)
        again = await decode.submitted(2)
        assert again.delivered == (100,)
        assert again.job.attempt == job.attempt + 1
        await decode.say_tokens(job, 1, 555)
        assert stage.dropped("unknown_job") == 1
        await decode.say(decode.lease(again.job))
        await prefill.submitted(2)
        await prefill.say_tokens(again.job, 1, 101)
        await prefill.say(handed_over(again.job))
        await decode.say(Started(again.job, 0))
        await decode.say_tokens(again.job, 2, 102, 103)
        await decode.say(finished(again.job))
        assert (await answer).tokens[0] == [100, 101, 102, 103]


@pytest.mark.parametrize("told_by", ["prefill-0", "decode-0"])
async def test_what_was_cached_is_told_of_the_first_attempt(told_by: str) -> None:
    """The second finds what the first computed, which the client did not save."""
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        await prefill.say(Started(job, 4))
        await prefill.say_tokens(job, 0, 100)
        outcome = Outcome.TRANSFER_FAILED if told_by == "prefill-0" else Outcome.EXPIRED
        await stage.workers[told_by].say(Ended(job, outcome, message="nothing came"))
        again = await stage.leased(2)
        await prefill.say(Started(again, 30))
        await prefill.say_tokens(again, 1, 101)
        await prefill.say(handed_over(again))
        await decode.say(Started(again, 0, 101))
        await decode.say_tokens(again, 2, 102, 103)
        await decode.say(finished(again))
        usage = (await answer).usage
        assert (usage.attempts, usage.cached_tokens) == (2, 4)


async def test_what_was_cached_is_told_when_the_end_of_the_transfer_is_not_heard_of_in_time() -> None:
    """The prefill side's figures hold an answer up for a second, no longer."""
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        await prefill.say(Started(job, 8))
        await prefill.say_tokens(job, 0, 100)
        await decode.say(Started(job, 0, 100))
        await decode.say_tokens(job, 1, 101, 102, 103)
        await decode.say(finished(job))
        result = await answer
        assert (result.usage.cached_tokens, result.usage.transport) == (8, "")


async def test_no_pages_waits_for_the_next_load_report_without_counting_an_attempt() -> None:
    async with scene() as stage:
        answer = stage.submit(1 + 1)
        decode = stage.workers["decode-0"]
        for number in range(1, 6):
            job = (await decode.submitted(number)).job
            await decode.say(Refused(job, RefusalReason.NO_PAGES, "full"))
            assert len(decode.heard) == number
            await decode.say(decode.load())
        job = (await decode.submitted(6)).job
        await decode.say(decode.lease(job))
        prefill = stage.workers["prefill-0"]
        await prefill.submitted()
        await prefill.say_tokens(job, 0, 100)
        await prefill.say(handed_over(job))
        await decode.say(Started(job, 0))
        await decode.say_tokens(job, 1, 101)
        await decode.say(finished(job, 2))
        assert (await answer).usage.attempts == 1


async def test_a_refusing_prefill_worker_releases_the_lease() -> None:
    async with scene() as stage:
        answer = stage.submit()
        job = await stage.leased()
        prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
        await prefill.say(Refused(job, RefusalReason.DRAINING, "leaving"))
        assert await decode.hear(Cancel) == Cancel(job)
        local = await decode.submitted(2)
        assert local.stroke is Stroke.LOCAL
        await decode.say(Started(local.job, 0))
        await decode.say_tokens(local.job, 0, 1, 2, 3, 4)
        await decode.say(finished(local.job))
        await answer


@pytest.mark.parametrize(
    ("reason", "error"), [(RefusalReason.TOO_LARGE, ContextOverflow), (RefusalReason.BAD_SUBMIT, InternalError)]
)
async def test_a_hopeless_refusal_ends_the_request(reason: RefusalReason, error: type[Exception]) -> None:
    async with scene() as stage:
        answer = stage.submit()
        job = (await stage.workers["decode-0"].submitted()).job
        await stage.workers["decode-0"].say(Refused(job, reason, "no"))
        with pytest.raises(error):
            await answer


async def test_a_frozen_worker_is_handled_as_lost() -> None:
    async with scene("prefill-0", "decode-0", "decode-1") as stage:
        answer = stage.submit()
        await until(lambda: any(stage.workers[name].heard for name in ("decode-0", "decode-1")))
        frozen, other = ("decode-0", "decode-1") if stage.workers["decode-0"].heard else ("decode-1", "decode-0")
        await stage.workers[frozen].say(stage.workers[frozen].load(running=1, step_age_s=11.0))
        job = (await stage.workers[other].submitted()).job
        assert stage.dispatcher.fleet.find(stage.workers[frozen].info.incarnation) is None
        stage.dispatcher.cancel(job.request_id)
        with pytest.raises(Exception, match="cancelled"):
            await answer


async def test_a_link_that_broke_before_it_was_attached_is_not_used() -> None:
    async with scene() as stage:
        worker = ScriptedWorker(worker_info("decode-9"))
        link = worker.link(stage.dispatcher)
        link.cut("gone at once")
        assert not stage.dispatcher.attach(link)
        assert not stage.dispatcher.attach(stage.links["decode-0"])


@pytest.mark.parametrize("ending", ["finished", "cancelled"])
async def test_a_request_that_ended_leaves_nothing_to_collect(ending: str) -> None:
    """Else each leaves some thirty objects to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        async with scene() as stage:
            answer = stage.submit()
            job = await stage.leased()
            prefill, decode = stage.workers["prefill-0"], stage.workers["decode-0"]
            if ending == "finished":
                await prefill.say(Started(job, 8), handed_over(job))
                await decode.say(Started(job, 0, 100), Tokens((TokenRun(job, 1, (101, 102, 103)),)), finished(job))
                assert (await answer).tokens[0] == [100, 101, 102, 103]
            else:
                stage.dispatcher.cancel(RequestId("r"))
                with pytest.raises(Cancelled):
                    await answer
            assert not [one for one in gc.get_objects() if isinstance(one, RequestRecord | ChoiceRecord)]
    finally:
        gc.enable()
