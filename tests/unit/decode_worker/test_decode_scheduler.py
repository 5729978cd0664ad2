"""Stories of a decode worker's jobs: leases, commits, local prefill, preemption, and every way to end."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine_builders import (
    VOCAB,
    Bench,
    expected_output,
    fill_page,
    job_id,
    make_decode,
    make_info,
    make_prompt,
    make_submit,
)
from twostroke.cluster.core.ids import LeaseId
from twostroke.cluster.core.messages import Lease, Outcome, RefusalReason, RenewLease, Role, Stroke, Submit
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.decode_worker.scheduler import DecodeLimits
from twostroke.engine.commands import (
    Committed,
    Drain,
    LeaseClosed,
    LeaseOpened,
    LeaseRenewed,
    LeaseTouched,
    PagesReleased,
)


def reserve(length: int = 10, *, name: str = "a", first: int = 1, **more: object) -> Submit:
    submit = make_submit(Stroke.RESERVE, make_prompt(length, first), name=name)
    return replace(submit, **more)  # type: ignore[arg-type]


def local(length: int = 10, *, name: str = "a", first: int = 1, **more: object) -> Submit:
    return reserve(length, name=name, first=first, stroke=Stroke.LOCAL, **more)


def lease_of(bench: Bench, name: str = "a") -> Lease:
    return bench.answer(name).leases[-1]


def ship(bench: Bench, name: str = "a") -> None:
    """Write what a prefill worker would into the leased pages."""
    submit, lease = bench.answer(name).submit, lease_of(bench, name)
    tokens = submit.prompt + submit.delivered
    size = bench.info.layout.page_size
    for index, page in enumerate(lease.shards[0].pages, start=lease.num_held):
        fill_page(bench, page, index * size, tokens[index * size : (index + 1) * size])


def commit(bench: Bench, name: str = "a", epoch: int = 1) -> None:
    submit, lease = bench.answer(name).submit, lease_of(bench, name)
    index = len(submit.delivered)
    bench.post(Committed(submit.job, lease.lease_id, epoch, expected_output(submit)[index], index))


def outcome(bench: Bench, name: str = "a") -> Outcome | None:
    ended = bench.answer(name).ended
    return None if ended is None else ended.outcome


def release_quarantine(bench: Bench) -> None:
    for event in bench.take(LeaseClosed):
        assert isinstance(event, LeaseClosed)
        if not event.committed:
            bench.post(PagesReleased(event.lease_id))


# ------------------------------------------------------------------------------------------------- leases


def test_a_reservation_is_leased_committed_decoded_and_finished() -> None:
    bench = make_decode()
    bench.send(reserve(10))
    lease = lease_of(bench)
    assert [type(event) for event in bench.events] == [LeaseOpened]
    assert (lease.num_held, lease.num_pages, lease.epoch, len(lease.nonce)) == (0, 3, 1, 16)
    assert (bench.load.leases, bench.load.ledger.leased, bench.load.running) == (1, 3, 0)
    ship(bench)
    commit(bench)
    assert bench.answer().started is not None
    assert bench.take(LeaseClosed) == [LeaseClosed(lease.lease_id, committed=True)]
    bench.run()
    assert bench.answer().tokens == expected_output(reserve(10))[1:]
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.finish_reason, ended.num_output) == (Outcome.FINISHED, FinishReason.LENGTH, 8)
    bench.check_at_rest()


@pytest.mark.parametrize(("length", "shown", "leased"), [(1, 1, 1), (3, 1, 1), (4, 1, 2), (5, 2, 2), (8, 2, 3)])
def test_a_lease_shows_the_pages_to_ship_and_reserves_a_slot_for_the_next_token(
    length: int, shown: int, leased: int
) -> None:
    bench = make_decode()
    bench.send(reserve(length))
    assert len(lease_of(bench).shards[0].pages) == shown
    assert bench.load.ledger.leased == leased


def test_leading_cached_pages_are_held_and_cannot_be_evicted() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=8))
    bench.send(local(12))
    bench.run()
    bench.send(reserve(12, name="b"))
    lease = lease_of(bench, "b")
    assert (lease.num_held, len(lease.shards[0].pages)) == (2, 1)  # never the page of the last token
    assert bench.load.ledger.active == 2
    bench.send(local(12, name="c", first=50))  # evicts all that it may
    bench.run()
    ship(bench, "b")
    commit(bench, "b")
    bench.run()
    assert bench.answer("b").tokens == expected_output(reserve(12))[1:]
    started = bench.answer("b").started
    assert started is not None
    assert started.cached_tokens == 8
    bench.check_at_rest()


def test_a_lease_is_refused_when_running_jobs_could_not_grow_afterwards() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=6))
    bench.send(reserve(8))  # 3 pages with the slot of the next token
    bench.send(reserve(8, name="b", first=40))  # 3 more would leave nothing for the first to grow
    refused = bench.answer("b").refused
    assert refused is not None
    assert refused.reason is RefusalReason.NO_PAGES
    bench.send(reserve(4, name="c", first=60))  # 2 pages leave one for it
    assert lease_of(bench, "c")
    bench.cancel("a")
    bench.cancel("c")
    release_quarantine(bench)
    bench.check_at_rest()


def test_leases_do_not_take_pages_from_jobs_that_wait_for_them() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=8), DecodeLimits(max_running=1))
    bench.send(local(8))
    bench.step()
    bench.send(local(12, name="waits", first=30))
    bench.send(reserve(8, name="b", first=60))
    assert bench.answer("b").refused is not None
    bench.run()
    assert outcome(bench, "waits") is Outcome.FINISHED


def test_a_lease_lives_until_its_ttl_after_the_last_renewal_or_chunk() -> None:
    bench = make_decode(limits=DecodeLimits(lease_ttl_s=10.0))
    bench.send(reserve())
    bench.wait(9.0)
    bench.send(RenewLease(job_id()))
    bench.wait(9.0)
    bench.post(LeaseTouched(lease_of(bench).lease_id))
    bench.wait(9.0)
    assert bench.load.leases == 1
    bench.wait(1.0)
    assert outcome(bench) is Outcome.EXPIRED
    assert bench.load.ledger.quarantined == 3
    assert not bench.scheduler.idle
    bench.post(LeaseTouched(lease_of(bench).lease_id))
    commit(bench)  # late: the lease is gone
    assert bench.load.running == bench.load.waiting == 0
    release_quarantine(bench)
    bench.check_at_rest()


def test_quarantined_pages_are_given_to_nobody() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=5))
    bench.send(reserve(12))
    bench.cancel()
    bench.send(reserve(12, name="b"))
    refused = bench.answer("b").refused
    assert refused is not None
    assert refused.reason is RefusalReason.NO_PAGES
    release_quarantine(bench)
    bench.send(reserve(12, name="c"))
    assert lease_of(bench, "c")


def test_renewing_announces_a_new_epoch_and_nonce_for_the_same_pages() -> None:
    bench = make_decode()
    bench.send(reserve())
    old = lease_of(bench)
    bench.send(RenewLease(job_id(), bump_epoch=True))
    assert lease_of(bench) is old  # the book has not agreed yet
    bench.post(LeaseRenewed(old.lease_id, 2))
    new = lease_of(bench)
    assert (new.lease_id, new.epoch) == (old.lease_id, 2)
    assert new.nonce != old.nonce
    assert new.shards == old.shards
    assert len(bench.take(LeaseOpened)) == 2
    ship(bench)
    commit(bench, epoch=2)
    bench.run()
    assert bench.answer().tokens == expected_output(reserve())[1:]


def test_a_commit_that_the_book_verified_stands_after_a_renewal() -> None:
    """The book refuses every later writer, so no other prefill worker may be asked to be one."""
    bench = make_decode()
    bench.send(reserve())
    ship(bench)
    bench.send(RenewLease(job_id(), bump_epoch=True))
    commit(bench, epoch=1)
    assert bench.answer().started is not None
    assert len(bench.answer().leases) == 1
    bench.post(LeaseRenewed(lease_of(bench).lease_id, 2))  # of a lease that is over: dropped
    assert len(bench.answer().leases) == 1
    assert bench.load.leases == 0
    commit(bench, epoch=2)
    bench.run()
    assert bench.answer().tokens == expected_output(reserve())[1:]
    bench.check_at_rest()


def test_a_first_token_that_ends_the_answer_finishes_at_the_commit() -> None:
    first = expected_output(reserve())[0]
    bench = make_decode()
    bench.send(reserve(sampling=SamplingParams(max_tokens=8, end_token_ids=(first,))))
    ship(bench)
    commit(bench)
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.finish_reason, ended.num_output) == (Outcome.FINISHED, FinishReason.STOP, 1)
    assert bench.answer().tokens == []
    bench.check_at_rest()


@pytest.mark.parametrize(("token", "index"), [(VOCAB, 0), (-1, 0), (5, 1)])
def test_a_commit_that_does_not_fit_the_job_fails_it(token: int, index: int) -> None:
    bench = make_decode()
    bench.send(reserve())
    bench.post(Committed(job_id(), lease_of(bench).lease_id, 1, token, index))
    assert outcome(bench) is Outcome.FAILED
    bench.check_at_rest()


def test_a_continuation_tells_only_what_comes_after_the_delivered_and_first_tokens() -> None:
    whole = expected_output(reserve())
    bench = make_decode()
    bench.send(reserve(delivered=tuple(whole[:3])))
    ship(bench)
    commit(bench)
    bench.run()
    assert bench.answer().tokens == whole[4:]


# -------------------------------------------------------------------------------------------------- local


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 9, 10, 11, 64])
@pytest.mark.parametrize("length", [1, 4, 10])
def test_local_prefill_gives_the_golden_answer_for_every_chunk_size(length: int, chunk_tokens: int) -> None:
    bench = make_decode(make_info(Role.DECODE, chunk_tokens=chunk_tokens))
    bench.send(local(length))
    bench.run()
    assert bench.answer().started is not None
    assert bench.answer().tokens == expected_output(local(length))
    bench.check_at_rest()


def test_a_long_prompt_does_not_stop_running_jobs() -> None:
    bench = make_decode(make_info(Role.DECODE, chunk_tokens=4))
    bench.send(local(4, sampling=SamplingParams(max_tokens=20)))
    bench.step()
    bench.send(local(12, name="long", first=50))
    told = len(bench.answer().tokens)
    for _ in range(4):
        bench.step()
    assert len(bench.answer().tokens) == told + 4
    bench.run()
    assert bench.answer("long").tokens == expected_output(local(12, first=50))


def test_started_means_that_the_job_left_the_queue() -> None:
    bench = make_decode(limits=DecodeLimits(max_running=1))
    bench.send(local())
    bench.send(local(name="b", first=40))
    bench.step()
    assert bench.answer("a").started is not None
    assert bench.answer("b").started is None
    assert bench.load.waiting == 1
    bench.run()
    assert bench.answer("b").tokens == expected_output(local(first=40))
    bench.check_at_rest()


def test_equal_prompts_hit_the_cache_and_give_equal_answers() -> None:
    bench = make_decode()
    for name in "ab":
        bench.send(local(12, name=name))
        bench.run()
    started = bench.answer("b").started
    assert started is not None
    assert started.cached_tokens == 8
    assert bench.answer("a").tokens == bench.answer("b").tokens


def test_answers_are_cached_too_so_that_a_conversation_goes_on() -> None:
    bench = make_decode()
    bench.send(local(10))
    bench.run()
    turn = make_prompt(10) + tuple(bench.answer().tokens)
    bench.send(local(name="b", prompt=(*turn, 1, 2)))
    bench.run()
    started = bench.answer("b").started
    assert started is not None
    assert started.cached_tokens == 16  # of 17 computed ones


# --------------------------------------------------------------------------------------------- preemption


def tight(num_pages: int = 8, **limits: int) -> Bench:
    return make_decode(make_info(Role.DECODE, num_pages=num_pages), DecodeLimits(**limits))


def test_out_of_pages_the_latest_is_preempted_and_everybody_finishes_right() -> None:
    bench = tight(8)
    sampling = SamplingParams(max_tokens=16)
    bench.send(local(8, sampling=sampling))
    bench.send(local(8, name="b", first=40, sampling=sampling))
    bench.run()
    for name, first in (("a", 1), ("b", 40)):
        assert bench.answer(name).tokens == expected_output(local(8, first=first, sampling=sampling))
    preemptions = [ended.timings.preemptions for name in "ab" if (ended := bench.answer(name).ended)]
    assert preemptions[0] == 0
    assert preemptions[1] > 0
    bench.check_at_rest()


@pytest.mark.parametrize("limits", [{"max_preemptions": 0}, {"local_resume_tokens": 0}])
def test_what_may_not_resume_here_is_given_back(limits: dict[str, int]) -> None:
    bench = tight(8, **limits)
    sampling = SamplingParams(max_tokens=16)
    bench.send(local(8, sampling=sampling))
    bench.send(local(8, name="b", first=40, sampling=sampling))
    bench.run()
    assert outcome(bench, "a") is Outcome.FINISHED
    ended = bench.answer("b").ended
    assert ended is not None
    assert (ended.outcome, ended.num_output) == (Outcome.PREEMPTED, len(bench.answer("b").tokens))
    bench.check_at_rest()


def test_the_only_job_waits_for_leases_to_end_instead_of_being_preempted() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=5), DecodeLimits(lease_ttl_s=5.0))
    bench.send(local(4, sampling=SamplingParams(max_tokens=12)))
    bench.step()
    bench.send(reserve(4, name="b", first=40))
    assert bench.load.leases == 1
    bench.run()
    assert outcome(bench) is None
    assert bench.load.step_age_s == 0.0
    bench.wait(5.0)
    release_quarantine(bench)
    bench.run()
    assert bench.answer().tokens == expected_output(local(4, sampling=SamplingParams(max_tokens=12)))
    bench.check_at_rest()


# --------------------------------------------------------------------------- every phase x every way to end


def leased(bench: Bench) -> None:
    bench.send(reserve())


def half_shipped(bench: Bench) -> None:
    bench.send(reserve())
    bench.post(LeaseTouched(lease_of(bench).lease_id))


def renewed(bench: Bench) -> None:
    bench.send(reserve())
    bench.send(RenewLease(job_id(), bump_epoch=True))


def ready(bench: Bench) -> None:
    """Committed, but the batch is full (FIELD-REPORTS A9)."""
    bench.send(local(name="other", first=50))
    bench.step()
    bench.send(reserve())
    ship(bench)
    commit(bench)
    bench.step()
    assert bench.load.waiting == 1


def waiting(bench: Bench) -> None:
    bench.send(local(name="other", first=50))
    bench.step()
    bench.send(local())


def running_prompt(bench: Bench) -> None:
    bench.send(local())
    bench.step()
    assert not bench.answer().tokens


def running(bench: Bench) -> None:
    bench.send(reserve())
    ship(bench)
    commit(bench)
    bench.step()


def preempted(bench: Bench) -> None:
    """In the queue again, after it was out of pages."""
    running(bench)
    scheduler = bench.scheduler
    scheduler._preempt(scheduler._queues.running[job_id()], bench.now_s)  # type: ignore[attr-defined]


def ended(bench: Bench) -> None:
    running(bench)
    bench.run()


PHASES = [leased, half_shipped, renewed, ready, waiting, running_prompt, running, preempted, ended]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["cancel", "cancel twice", "router gone", "expiry", "late commit", "failed step"])
def test_every_phase_ends_once_in_every_way_and_gives_its_pages_back(phase: Callable[[Bench], None], way: str) -> None:
    """FIELD-REPORTS A9-A11: no cell of the table may be missing."""
    bench = make_decode(make_info(Role.DECODE, chunk_tokens=8), DecodeLimits(max_running=1))
    phase(bench)
    match way:
        case "cancel":
            bench.cancel()
        case "cancel twice":
            bench.cancel()
            bench.cancel()
        case "router gone":
            bench.lose_router()
        case "expiry":
            bench.wait(1000.0)
        case "late commit":
            bench.cancel()
            leases = bench.answer().leases
            lease_id = leases[-1].lease_id if leases else LeaseId("never")
            bench.post(Committed(job_id(), lease_id, 1, 5, 0))
            bench.post(LeaseTouched(lease_id))
            bench.post(PagesReleased(LeaseId("never")))
        case "failed step":
            bench.fail_next = True
            bench.step()
            bench.cancel()
    if way != "router gone":
        assert bench.answer().ended is not None
    bench.run()
    release_quarantine(bench)
    bench.check_at_rest()


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        (make_submit(Stroke.PREFILL), RefusalReason.WRONG_ROLE),
        (reserve(prompt=()), RefusalReason.BAD_SUBMIT),
        (local(prompt=(VOCAB,)), RefusalReason.BAD_SUBMIT),
        (local(delivered=(1,) * 8), RefusalReason.BAD_SUBMIT),
        (local(121), RefusalReason.TOO_LARGE),
        (reserve(121), RefusalReason.TOO_LARGE),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(submit: Submit, reason: RefusalReason) -> None:
    bench = make_decode()
    bench.send(submit)
    refused = bench.answer().refused
    assert refused is not None
    assert refused.reason is reason
    bench.check_at_rest()


def test_an_answer_that_just_fits_the_whole_pool_is_served() -> None:
    bench = make_decode(make_info(Role.DECODE, num_pages=8))
    submit = local(24)
    bench.send(submit)
    bench.run()
    assert bench.answer().tokens == expected_output(submit)


def test_full_queues_refuse_and_a_draining_worker_finishes_what_it_has() -> None:
    bench = make_decode(limits=DecodeLimits(max_running=1, max_waiting=1))
    bench.send(local())
    bench.send(local(name="b"))
    bench.send(reserve(4, name="c", first=30))
    bench.send(reserve(4, name="d", first=40))
    bench.send(reserve(4, name="e", first=50))
    for name in "be":
        refused = bench.answer(name).refused
        assert refused is not None
        assert refused.reason is RefusalReason.QUEUE_FULL
    bench.post(Drain())
    bench.send(local(name="f"))
    refused = bench.answer("f").refused
    assert refused is not None
    assert refused.reason is RefusalReason.DRAINING
    ship(bench, "c")
    commit(bench, "c")
    bench.run()
    assert bench.answer("a").tokens == expected_output(local())
    assert bench.answer("c").tokens == expected_output(reserve(4, first=30))[1:]


def test_a_job_is_not_accepted_twice() -> None:
    bench = make_decode()
    bench.send(local())
    bench.send(local())
    refused = bench.answer().refused
    assert refused is not None
    assert refused.reason is RefusalReason.BAD_SUBMIT
