"""Stories of a prefill worker's jobs: admission, chunks, announcements, hand-over, and every way to end."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine_builders import (
    ROUTER,
    VOCAB,
    Bench,
    expected_output,
    job_id,
    make_info,
    make_lease,
    make_prefill,
    make_prompt,
    make_submit,
    page_slots,
)
from twostroke.cluster.core.messages import Cancel, Outcome, RefusalReason, Role, Started, Stroke, Submit
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.engine.commands import (
    Drain,
    FromRouter,
    PagesReady,
    PrefillDone,
    Published,
    RouterGone,
    ShipmentDropped,
    ShipmentEnded,
    ShipmentTouched,
    Snapshot,
    SnapshotTaken,
    ToRouter,
)
from twostroke.engine.fake_executor import golden_logprobs
from twostroke.engine.job import MAX_SCORED
from twostroke.prefill_worker.scheduler import PrefillLimits


def shipment_ended(name: str = "a", error: str = "") -> ShipmentEnded:
    return ShipmentEnded(job_id(name), error, pages=3, bytes=300, busy_s=0.25, transport="loopback")


def prefill(length: int = 10, *, name: str = "a", num_held: int = 0, **more: object) -> Submit:
    lease = make_lease(-(-length // 4), num_held=num_held, name=name)
    submit = make_submit(Stroke.PREFILL, make_prompt(length), name=name, lease=lease)
    return replace(submit, **more)  # type: ignore[arg-type]


def ready(bench: Bench) -> list[tuple[int, int]]:
    """(first position in the lease, number of pages) of every announcement since the last call."""
    return [(event.first, len(event.pages)) for event in bench.take(PagesReady) if isinstance(event, PagesReady)]


# ------------------------------------------------------------------------------------------- a whole life


def test_a_prompt_is_prefilled_announced_and_handed_over() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=6))
    bench.send(prefill(10))
    bench.step()  # tokens 0..5: one full page
    assert ready(bench) == [(0, 1)]
    bench.step()  # tokens 6..9: a full page, and the last one with two tokens in it
    assert ready(bench) == [(1, 2)]
    [done] = bench.take(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert bench.answer().tokens == [done.first_token] == expected_output(prefill(10))[:1]
    assert done.first_token_index == 0
    assert bench.load.ledger.active == 3
    bench.now_s = 0.5
    bench.post(shipment_ended())
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.num_output) == (Outcome.HANDED_OVER, 1)
    assert (ended.timings.pages_shipped, ended.timings.transport) == (3, "loopback")
    assert (ended.timings.transfer_exposed_s, ended.timings.computed_tokens) == (0.5, 10)
    bench.check_at_rest()


def test_announced_pages_hold_their_tokens_until_the_shipment_ends() -> None:
    bench = make_prefill(make_info(Role.PREFILL, num_pages=5))
    bench.send(prefill(10))
    bench.run()
    announced = [page for event in bench.events if isinstance(event, PagesReady) for page in event.pages]
    bench.send(
        prefill(16, name="b", prompt=make_prompt(16, 50))
    )  # needs four pages of five: waits, and must not take these
    bench.run()
    assert bench.load.waiting == 1
    prompt = make_prompt(10)
    for index, page in enumerate(announced):
        ids, marks = page_slots(bench, page)
        count = len(prompt[index * 4 : index * 4 + 4])
        assert ids[:count] == list(prompt[index * 4 : index * 4 + 4])
        assert marks[:count] == list(range(index * 4 + 1, index * 4 + count + 1))
    bench.post(shipment_ended())
    bench.run()
    assert bench.answer("b").tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_every_length_ships_all_of_its_pages_and_no_more(length: int) -> None:
    bench = make_prefill()
    bench.send(prefill(length))
    bench.run()
    assert sum(count for _, count in ready(bench)) == -(-length // 4)
    bench.post(shipment_ended())
    bench.check_at_rest()


def test_held_pages_are_not_announced_and_positions_are_relative() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=4))
    bench.send(prefill(10, num_held=1))
    bench.run()
    assert ready(bench) == [(0, 1), (1, 1)]


def test_a_cached_prefix_is_announced_before_anything_is_computed() -> None:
    bench = make_prefill()
    bench.send(prefill(12))
    bench.run()
    bench.post(shipment_ended())
    ready(bench)
    bench.send(prefill(12, name="b"))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_computed == [8]  # two pages of three: never the last token
    bench.events += bench.scheduler.take_events()
    assert bench.take(ToRouter) == [ToRouter(ROUTER, (Started(job_id("b"), 8),))]
    assert ready(bench) == [(0, 2)]
    bench.scheduler.apply(plan, bench.executor.launch(plan).result(), 0.0)
    bench._flush()
    assert bench.answer("b").tokens == expected_output(prefill(12))[:1]
    bench.post(shipment_ended("b"))
    ended = bench.answer("b").ended
    assert ended is not None
    assert (ended.timings.cached_tokens, ended.timings.computed_tokens) == (8, 4)


def test_salts_do_not_share_pages() -> None:
    bench = make_prefill()
    for name, salt in (("a", ""), ("b", "tenant")):
        bench.send(replace(prefill(12, name=name), salt=salt))
        bench.run()
        bench.post(shipment_ended(name))
        ended = bench.answer(name).ended
        assert ended is not None
        assert ended.timings.cached_tokens == 0


def test_several_jobs_share_a_step_in_order_of_arrival() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=16))
    for index, name in enumerate("abc"):
        bench.send(replace(prefill(7, name=name), prompt=make_prompt(7, first=20 * index)))
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    assert (plan.jobs, plan.num_new) == ([job_id("a"), job_id("b"), job_id("c")], [7, 7, 2])


def test_a_continuation_samples_the_next_index_only() -> None:
    whole = expected_output(make_submit(Stroke.PREFILL, make_prompt(10)))
    bench = make_prefill()
    lease = make_lease(4)
    bench.send(make_submit(Stroke.PREFILL, make_prompt(10), delivered=whole[:3], lease=lease))
    bench.run()
    [done] = bench.take(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert (done.first_token_index, done.first_token) == (3, whole[3])


# -------------------------------------------------------------------------------------------- short answers


def test_without_a_lease_one_token_is_sampled_and_nothing_is_shipped() -> None:
    bench = make_prefill()
    bench.send(make_submit(Stroke.PREFILL, max_tokens=1))
    bench.run()
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.finish_reason, ended.num_output) == (Outcome.FINISHED, FinishReason.LENGTH, 1)
    assert not bench.take(PagesReady)
    bench.check_at_rest()


def test_with_no_token_to_go_the_prompt_is_computed_and_none_is_told() -> None:
    bench = make_prefill()
    bench.send(make_submit(Stroke.PREFILL, max_tokens=0))
    bench.run()
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.num_output, bench.answer().tokens) == (Outcome.FINISHED, 0, [])


def test_a_first_token_that_ends_the_answer_drops_the_shipment_and_holds_the_pages_until_it_ended() -> None:
    first = expected_output(prefill(10))[0]
    bench = make_prefill()
    bench.send(prefill(10, sampling=SamplingParams(max_tokens=8, end_token_ids=(first,))))
    bench.step()
    ready(bench)  # a chunk that ends the prompt announces nothing when the first token is the end
    assert bench.answer().tokens == [first]
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.finish_reason) == (Outcome.FINISHED, FinishReason.STOP)
    assert not bench.take(PrefillDone)
    bench.check_at_rest()


def test_the_same_after_a_chunk_was_announced() -> None:
    first = expected_output(prefill(10))[0]
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=4))
    bench.send(prefill(10, sampling=SamplingParams(max_tokens=8, end_token_ids=(first,))))
    bench.run()
    assert len(bench.take(ShipmentDropped)) == 1
    assert bench.load.ledger.active == 3
    assert not bench.scheduler.idle
    bench.post(shipment_ended(error="dropped"))
    bench.check_at_rest()


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        (make_submit(Stroke.RESERVE), RefusalReason.WRONG_ROLE),
        (make_submit(Stroke.LOCAL), RefusalReason.WRONG_ROLE),
        (prefill(10, prompt=()), RefusalReason.BAD_SUBMIT),
        (prefill(10, prompt=(1, VOCAB)), RefusalReason.BAD_SUBMIT),
        (prefill(10, prompt=(1, -1)), RefusalReason.BAD_SUBMIT),
        (prefill(10, delivered=(VOCAB,)), RefusalReason.BAD_SUBMIT),
        (prefill(10, delivered=(1,) * 8), RefusalReason.BAD_SUBMIT),
        (prefill(10, lease=make_lease(2)), RefusalReason.BAD_SUBMIT),
        (prefill(10, lease=None), RefusalReason.BAD_SUBMIT),
        (prefill(10, lease=make_lease(3, page_size=16)), RefusalReason.LAYOUT),
        (prefill(129), RefusalReason.TOO_LARGE),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(submit: Submit, reason: RefusalReason) -> None:
    bench = make_prefill()
    bench.send(submit)
    refused = bench.answer().refused
    assert refused is not None
    assert (refused.reason, bool(refused.message)) == (reason, True)
    bench.check_at_rest()


def test_a_full_queue_refuses_and_a_draining_worker_too() -> None:
    bench = make_prefill(limits=PrefillLimits(max_waiting=1))
    bench.send(prefill(name="a"))
    bench.send(prefill(name="b"))
    refused = bench.answer("b").refused
    assert refused is not None
    assert refused.reason is RefusalReason.QUEUE_FULL
    bench.post(Drain())
    bench.send(prefill(name="c"))
    refused = bench.answer("c").refused
    assert refused is not None
    assert refused.reason is RefusalReason.DRAINING
    bench.run()
    bench.post(shipment_ended("a"))
    assert bench.answer("a").ended is not None
    assert bench.load.draining
    bench.check_at_rest()


# --------------------------------------------------------------------------- every phase x every way to end


def waiting(bench: Bench) -> None:
    bench.send(prefill(16, name="blocker"))
    bench.step()
    bench.send(prefill(12))


def running(bench: Bench) -> None:
    bench.send(prefill(12))
    bench.step()


def running_before_a_page(bench: Bench) -> None:
    bench.send(prefill(12, num_held=1))
    bench.step()


def shipping(bench: Bench) -> None:
    bench.send(prefill(12))
    bench.run()


def dropped(bench: Bench) -> None:
    shipping(bench)
    bench.cancel()


PHASES = [waiting, running, running_before_a_page, shipping, dropped]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["cancel", "cancel twice", "router gone", "expiry", "shipment failed"])
def test_every_phase_ends_once_in_every_way_and_gives_its_pages_back(phase: Callable[[Bench], None], way: str) -> None:
    """FIELD-REPORTS A9-A11: no cell of the table may be missing."""
    bench = make_prefill(make_info(Role.PREFILL, num_pages=5, chunk_tokens=4, page_size=4))
    phase(bench)
    if way in ("cancel", "cancel twice"):
        bench.cancel()
        if way == "cancel twice":
            bench.cancel()
    elif way == "router gone":
        bench.lose_router()
    elif way == "expiry":
        bench.wait(1000.0)
    else:
        bench.post(shipment_ended(error="the peer is gone"))
        bench.cancel()
    if way != "router gone":
        assert bench.answer().ended is not None
        assert bench.answer().refused is None
    # The shipping task answers every drop, in its own time.
    for event in bench.take(ShipmentDropped):
        assert isinstance(event, ShipmentDropped)
        bench.post(ShipmentEnded(event.job, event.reason, 0, 0, 0.0, "loopback"))
    bench.cancel("blocker") if phase is waiting and way != "router gone" else None
    for event in bench.take(ShipmentDropped):
        assert isinstance(event, ShipmentDropped)
        bench.post(ShipmentEnded(event.job, event.reason, 0, 0, 0.0, "loopback"))
    bench.check_at_rest()


def test_cancelled_waiting_jobs_are_never_computed() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=4))
    bench.send(prefill(16))
    bench.step()
    for name in "bcdef":
        bench.send(prefill(16, name=name))
        bench.cancel(name)
    bench.run()
    ended = bench.answer()
    assert ended.tokens
    assert bench.load.num_steps == 4


def test_a_cancel_of_another_router_is_not_ours() -> None:
    bench = make_prefill()
    bench.send(prefill())
    bench.cancel(router=ROUTER)
    bench.send(prefill(name="b"))
    bench.post(FromRouter(type(ROUTER)("stranger"), Cancel(job_id("b"))))
    bench.run()
    assert bench.answer("b").tokens


def test_an_attempt_that_comes_back_before_its_shipment_ended_is_refused_for_now() -> None:
    """Its router was lost and came again, and renewed the lease for us."""
    bench = make_prefill()
    bench.send(prefill(10))
    bench.run()
    bench.lose_router()
    bench.send(prefill(10))
    refused = bench.answer().refused
    assert refused is not None
    assert refused.reason is RefusalReason.QUEUE_FULL
    bench.post(shipment_ended(error="dropped"))
    bench.send(prefill(10))
    bench.run()
    bench.post(shipment_ended())
    ended = bench.answer().ended
    assert ended is not None
    assert ended.outcome is Outcome.HANDED_OVER
    bench.check_at_rest()


def test_a_transfer_that_does_not_end_is_given_up_after_the_hold() -> None:
    bench = make_prefill(limits=PrefillLimits(hold_s=5.0))
    bench.send(prefill())
    bench.run()
    assert bench.scheduler.next_deadline_s() == 5.0
    bench.wait(5.0)
    ended = bench.answer().ended
    assert ended is not None
    assert ended.outcome is Outcome.TRANSFER_FAILED
    bench.post(shipment_ended())  # late, and without an error: the job has ended, the pages are given back
    bench.check_at_rest()


def test_the_hold_begins_anew_with_every_part_that_the_other_side_took() -> None:
    """A transfer that shares its pair with many others takes long, and gets on."""
    bench = make_prefill(limits=PrefillLimits(hold_s=5.0))
    bench.send(prefill(time_left_s=18.0))
    bench.post(ShipmentTouched(job_id()))  # while it computes, the job has no other deadline than its own
    bench.run()
    for end_s in (9.0, 13.0, 17.0, 18.0):
        bench.wait(4.0)
        assert bench.answer().ended is None
        bench.post(ShipmentTouched(job_id()))
        assert bench.scheduler.next_deadline_s() == end_s
    bench.wait(2.0)
    ended = bench.answer().ended
    assert ended is not None
    assert ended.outcome is Outcome.EXPIRED
    bench.post(ShipmentTouched(job_id()))  # its last word crossed ours
    bench.post(shipment_ended())
    bench.check_at_rest()


def test_a_second_end_of_a_shipment_is_ignored() -> None:
    bench = make_prefill()
    bench.send(prefill())
    bench.run()
    bench.post(shipment_ended())
    bench.post(shipment_ended())
    bench.check_at_rest()


def test_a_failed_step_ends_its_jobs_and_names_nothing() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=4))
    bench.send(prefill(4))
    bench.send(prefill(4, name="bystander"))
    bench.fail_next = True
    bench.step()
    ended = bench.answer().ended
    assert ended is not None
    assert (ended.outcome, ended.message) == (Outcome.FAILED, "the device is broken")
    assert not bench.take(Published)
    bench.run()
    assert bench.answer("bystander").tokens == expected_output(prefill(4))[:1]


def test_a_snapshot_holds_the_names_published_before_it() -> None:
    bench = make_prefill()
    bench.send(prefill(12))
    bench.run()
    bench.post(Snapshot(7))
    published = [event.batch for event in bench.take(Published) if isinstance(event, Published)]
    [taken] = bench.take(SnapshotTaken)
    assert isinstance(taken, SnapshotTaken)
    assert taken.number == 7
    assert taken.snapshot.sequence == published[-1].sequence
    assert set(taken.snapshot.keys) == {key for batch in published for key in batch.stored}


def test_a_step_age_counts_only_while_a_job_runs() -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=4))
    bench.wait(50.0)
    assert bench.load.step_age_s == 0.0
    bench.send(prefill(12))
    bench.step()
    bench.now_s += 3.0
    assert bench.load.step_age_s == 3.0
    bench.post(RouterGone(ROUTER))
    assert bench.load.step_age_s == 0.0


# -------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("length", [1, 2, 10, 25])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 16])
def test_a_scored_prompt_is_computed_whole_and_told_before_its_token(length: int, chunk_tokens: int) -> None:
    bench = make_prefill(make_info(Role.PREFILL, chunk_tokens=chunk_tokens))
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=8, prompt_logprobs=2 if name == "b" else None)
        bench.send(prefill(length, name=name, sampling=sampling))
        while not bench.answer(name).tokens:
            bench.step()
        bench.post(shipment_ended(name))
    assert bench.answer("a").prompt == []
    assert bench.answer("b").prompt == golden_logprobs(make_prompt(length), 1, 2, VOCAB)
    ended = bench.answer("b").ended
    assert ended is not None
    assert (ended.timings.cached_tokens, ended.timings.computed_tokens) == (0, length)
    bench.check_at_rest()


def test_one_step_scores_no_more_than_the_limit_and_others_have_the_rest() -> None:
    info = make_info(Role.PREFILL, chunk_tokens=400, num_pages=256, max_context=512)
    bench = make_prefill(info)
    scored = SamplingParams(max_tokens=8, prompt_logprobs=0)
    for name in ("a", "b"):
        bench.send(prefill(MAX_SCORED + 10, name=name, sampling=scored))
    bench.send(prefill(50, name="c"))
    bench.step()
    assert len(bench.answer("a").prompt) == MAX_SCORED
    assert bench.answer("b").prompt == []
    assert len(bench.answer("c").tokens) == 1
    bench.step()
    assert len(bench.answer("a").tokens) == 1
    assert len(bench.answer("b").prompt) == MAX_SCORED - 10
    bench.step()
    assert bench.answer("b").prompt == golden_logprobs(make_prompt(MAX_SCORED + 10), 1, 0, VOCAB)


def test_the_first_tokens_log_probability_goes_to_the_router_and_into_the_commit() -> None:
    bench = make_prefill()
    bench.send(prefill(10, sampling=SamplingParams(max_tokens=8, logprobs=1)))
    bench.step()
    [done] = bench.take(PrefillDone)
    assert isinstance(done, PrefillDone)
    assert [done.first_logprob] == golden_logprobs([*make_prompt(10), done.first_token], 10, 1, VOCAB)
