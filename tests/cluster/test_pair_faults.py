"""Cancels, broken streams, frozen and dead writers at every arrow of a request's life; nothing may leak."""

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from tests.cluster_harness import Shape
from tests.faulty_transport import Failer, FaultyTransport, Stopper
from tests.pair_driver import Driver, driven, prompt
from twostroke.cluster.core.messages import Cancel, Ended, Leased, Outcome, RenewLease, Started, Stroke, Submit
from twostroke.cluster.transport.base import Transport
from twostroke.engine.fake_executor import golden

Links = Literal["direct", "grpc"]
LINKS: list[Links] = ["direct", "grpc"]
PHASES = ["submitted", "reserved", "prefilling", "opening", "pushing", "committing", "decoding", "finished"]
STOPS = {"opening": "open", "pushing": "push", "committing": "commit"}


async def bring_to(driver: Driver, submit: Submit, phase: str, stopper: Stopper) -> None:
    """Take the request as far as `phase` on the first pair."""
    prefill, decode = driver.cluster.prefill[0], driver.cluster.decode[0]
    if phase == "submitted":
        driver.send(decode, submit)
        return
    lease = await driver.reserve(submit, decode)
    if phase == "reserved":
        return
    driver.prefill(submit, lease, prefill)
    if phase in STOPS:
        await asyncio.wait_for(stopper.reached.wait(), 5)
    elif phase == "decoding":
        await driver.until_tokens(submit.job, 3)
    elif phase == "finished":
        await driver.until(decode, submit.job, Ended)
        await driver.until(prefill, submit.job, Ended)


def around(script: Stopper | Failer) -> Callable[[Transport], Transport]:
    return lambda inner: FaultyTransport(inner, script)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_in_every_phase(links: Links, phase: str) -> None:
    stopper = Stopper(STOPS.get(phase, "nothing"))
    async with driven(Shape(links=links, step_delay_s=0.002), around(stopper)) as driver:
        prefill, decode = driver.cluster.prefill[0], driver.cluster.decode[0]
        submit = driver.submit(prompt(60), 200 if phase != "finished" else 5)
        await bring_to(driver, submit, phase, stopper)
        for _ in range(2):
            driver.send(decode, Cancel(submit.job))
            driver.send(prefill, Cancel(submit.job))
        end = await driver.until(decode, submit.job, Ended)
        assert end.outcome is (Outcome.FINISHED if phase == "finished" else Outcome.CANCELLED)
        if phase not in ("submitted", "reserved"):
            await driver.until(prefill, submit.job, Ended)
        await driver.cluster.rest()
        # The pair serves the next one, and nobody was answered twice.
        stopper.released.set()
        after = driver.submit(prompt(30, 5), 6)
        assert await driver.generate(after) == golden(after.prompt, 6, 1000)
        assert all(len(driver.of(node, submit.job, Ended)) <= 1 for node in (prefill, decode))


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_broken_router_stream_frees_everything(links: Links, phase: str) -> None:
    stopper = Stopper(STOPS.get(phase, "nothing"))
    async with driven(Shape(links=links, step_delay_s=0.002), around(stopper)) as driver:
        submit = driver.submit(prompt(60), 200 if phase != "finished" else 5)
        await bring_to(driver, submit, phase, stopper)
        for link in driver.links.values():
            link.close("the router dies")
        await driver.cluster.rest()
        stopper.released.set()
        other = Driver(driver.cluster)
        await other.attach(*driver.cluster.nodes)
        after = other.submit(prompt(30, 5), 6)
        assert await other.generate(after) == golden(after.prompt, 6, 1000)


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("where", ["push", "commit"])
async def test_a_frozen_writer_can_never_commit(links: Links, where: str) -> None:
    stopper = Stopper(where, frozen=True)
    async with driven(Shape(links=links, prefill=2), first_only(stopper)) as driver:
        frozen, healthy = driver.cluster.prefill
        decode = driver.cluster.decode[0]
        submit = driver.submit(prompt(40), 8)

        # 1. The writer freezes; the dispatcher gives it up and renews the lease under a new epoch.
        driver.prefill(submit, await driver.reserve(submit, decode), frozen)
        await asyncio.wait_for(stopper.reached.wait(), 5)
        driver.send(decode, RenewLease(submit.job, bump_epoch=True))
        renewed = (await driver.until(decode, submit.job, Leased, count=2)).lease
        assert renewed.epoch == 1 + driver.of(decode, submit.job, Leased)[0].lease.epoch

        # 2. Another one does the work.
        driver.prefill(submit, renewed, healthy)
        assert (await driver.until(healthy, submit.job, Ended)).outcome is Outcome.HANDED_OVER
        await driver.until(decode, submit.job, Ended)

        # 3. The first wakes up, is refused, and gives its pages back.
        stopper.released.set()
        assert (await driver.until(frozen, submit.job, Ended)).outcome is Outcome.TRANSFER_FAILED
        assert driver.tokens(submit.job) == golden(submit.prompt, 8, 1000)
        assert len(driver.of(decode, submit.job, Started)) == 1


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("where", ["open", "push", "commit"])
async def test_a_prefill_worker_killed_mid_transfer_is_replaced(links: Links, where: str) -> None:
    stopper = Stopper(where)
    async with driven(Shape(links=links, prefill=2), first_only(stopper)) as driver:
        dead, second = driver.cluster.prefill
        decode = driver.cluster.decode[0]
        submit = driver.submit(prompt(40), 8)
        driver.prefill(submit, await driver.reserve(submit, decode), dead)
        await asyncio.wait_for(stopper.reached.wait(), 5)
        await driver.cluster.lose(dead, "killed")
        while dead.info.worker_id not in driver.lost:
            await driver.news()

        driver.send(decode, RenewLease(submit.job, bump_epoch=True))
        driver.prefill(submit, (await driver.until(decode, submit.job, Leased, count=2)).lease, second)
        assert (await driver.until(decode, submit.job, Ended)).outcome is Outcome.FINISHED
        assert driver.tokens(submit.job) == golden(submit.prompt, 8, 1000)


@pytest.mark.parametrize("where", ["open", "push", "commit"])
async def test_a_failed_transfer_is_told_at_once_and_can_be_repeated(where: str) -> None:
    async with driven(Shape(hold_s=30.0), around(Failer(where))) as driver:
        prefill, decode = driver.cluster.prefill[0], driver.cluster.decode[0]
        submit = driver.submit(prompt(40), 8)
        driver.prefill(submit, await driver.reserve(submit, decode), prefill)
        end = await driver.until(prefill, submit.job, Ended)
        assert end.outcome is Outcome.TRANSFER_FAILED
        assert "as told" in end.message

        driver.send(decode, RenewLease(submit.job, bump_epoch=True))
        driver.prefill(submit, (await driver.until(decode, submit.job, Leased, count=2)).lease, prefill)
        assert (await driver.until(prefill, submit.job, Ended, count=2)).outcome is Outcome.HANDED_OVER
        await driver.until(decode, submit.job, Ended)
        assert driver.tokens(submit.job) == golden(submit.prompt, 8, 1000)


async def test_a_transfer_that_does_not_end_is_given_up_after_the_hold() -> None:
    stopper = Stopper("commit")
    async with driven(Shape(hold_s=0.2), around(stopper)) as driver:
        prefill, decode = driver.cluster.prefill[0], driver.cluster.decode[0]
        submit = driver.submit(prompt(40), 8)
        driver.prefill(submit, await driver.reserve(submit, decode), prefill)
        end = await driver.until(prefill, submit.job, Ended)
        assert end.outcome is Outcome.TRANSFER_FAILED
        assert "0.2 s" in end.message
        driver.send(decode, Cancel(submit.job))


async def test_a_lease_that_nobody_fills_expires() -> None:
    async with driven(Shape(lease_ttl_s=0.2)) as driver:
        decode = driver.cluster.decode[0]
        submit = driver.submit(prompt(40), 8)
        await driver.reserve(submit, decode)
        assert (await driver.until(decode, submit.job, Ended)).outcome is Outcome.EXPIRED


async def test_the_others_go_on_when_a_decode_worker_dies() -> None:
    async with driven(Shape(decode=2, step_delay_s=0.002)) as driver:
        dead, other = driver.cluster.decode
        lost, kept = driver.submit(prompt(20), 100, Stroke.LOCAL), driver.submit(prompt(20, 2), 100, Stroke.LOCAL)
        driver.send(dead, lost)
        driver.send(other, kept)
        await driver.until_tokens(lost.job, 3)
        await driver.cluster.lose(dead, "killed")
        await driver.until(other, kept.job, Ended)
        assert driver.tokens(kept.job) == golden(kept.prompt, 100, 1000)


def first_only(script: Stopper) -> Callable[[Transport], Transport]:
    """Wraps the first prefill worker's transport only."""
    wrapped: list[Transport] = []

    def wrap(inner: Transport) -> Transport:
        wrapped.append(inner)
        return FaultyTransport(inner, script) if len(wrapped) == 1 else inner

    return wrap
