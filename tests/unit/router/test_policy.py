"""Placement: costs, the load guard, local prefill, exclusions; each decision says why."""

from dataclasses import replace
from random import Random

import pytest

from tests.router_builders import fake_layout, view
from twostroke.cluster.config import PolicySection
from twostroke.cluster.core.ids import Incarnation
from twostroke.router.policy import Choice, Never, RequestFacts, Wait, WorkerView, choose

FACTS = RequestFacts(num_tokens=100, total_tokens=150)
WEIGHTS = PolicySection(local_threshold_tokens=16, balance_abs_tokens=1000, balance_rel=1.5)


def decide(
    prefill: list[WorkerView],
    decode: list[WorkerView],
    facts: RequestFacts = FACTS,
    weights: PolicySection = WEIGHTS,
    seed: int = 0,
) -> Choice:
    decision = choose(facts, prefill, decode, weights, Random(seed))
    assert isinstance(decision, Choice), decision
    assert decision.reason
    return decision


def names(choice: Choice) -> tuple[str, str]:
    return (choice.prefill.worker_id if choice.prefill else "", choice.decode.worker_id if choice.decode else "")


def life(worker_id: str) -> Incarnation:
    return Incarnation(f"{worker_id}-life")


def test_the_least_loaded_pair_is_chosen() -> None:
    prefill = [view("prefill-0", queued_tokens=50), view("prefill-1", queued_tokens=10)]
    decode = [view("decode-0", kv_tokens=400), view("decode-1", kv_tokens=100)]
    assert names(decide(prefill, decode)) == ("prefill-1", "decode-1")


def test_cached_tokens_outweigh_a_longer_queue() -> None:
    prefill = [view("prefill-0", queued_tokens=50, cached_tokens=80), view("prefill-1")]
    choice = decide(prefill, [view("decode-0")])
    assert names(choice)[0] == "prefill-0"
    assert "80 cached" in choice.reason


def test_running_requests_count_on_the_decode_side() -> None:
    decode = [view("decode-0", kv_tokens=10, running=5), view("decode-1", kv_tokens=60)]
    assert names(decide([view("prefill-0")], decode))[1] == "decode-1"


def test_affinity_yields_when_load_is_badly_skewed() -> None:
    facts = RequestFacts(num_tokens=3000, total_tokens=3010)
    prefill = [
        view("prefill-0", queued_tokens=2000, cached_tokens=2800, chunk_tokens=4096, max_context=4096),
        view("prefill-1", chunk_tokens=4096, max_context=4096),
    ]
    decode = [view("decode-0", max_context=4096)]
    guarded = decide(prefill, decode, facts)
    assert names(guarded)[0] == "prefill-1"
    assert "load guard" in guarded.reason
    calm = WEIGHTS.model_copy(update={"balance_abs_tokens": 4000})
    assert names(decide(prefill, decode, facts, calm))[0] == "prefill-0"


def test_equal_costs_are_drawn_at_random() -> None:
    prefill = [view("prefill-0"), view("prefill-1")]
    decode = [view("decode-0"), view("decode-1")]
    assert len({names(decide(prefill, decode, seed=seed)) for seed in range(40)}) == 4


@pytest.mark.parametrize(("cached", "kind"), [(84, "pair"), (85, "local")])
def test_a_prompt_whose_uncached_part_is_short_is_prefilled_on_the_decode_worker(cached: int, kind: str) -> None:
    assert decide([view("prefill-0")], [view("decode-0", cached_tokens=cached)]).kind == kind


def test_without_a_prefill_worker_the_decode_worker_prefills_if_it_may() -> None:
    choice = decide([], [view("decode-0")])
    assert choice.kind == "local"
    assert "no prefill worker" in choice.reason
    never = WEIGHTS.model_copy(update={"local_when_no_prefill": False})
    decision = choose(FACTS, [], [view("decode-0")], never, Random(0))
    assert isinstance(decision, Wait)
    assert decision.for_worker


def test_busy_prefill_workers_are_waited_for() -> None:
    busy = [view("prefill-0", queued_tokens=64, chunk_tokens=16)]
    assert choose(FACTS, busy, [view("decode-0")], WEIGHTS, Random(0)) == Wait("prefill queues")
    decide([view("prefill-0", queued_tokens=63, chunk_tokens=16)], [view("decode-0")])


def test_a_single_token_needs_no_decode_worker() -> None:
    facts = replace(FACTS, one_to_go=True)
    assert names(decide([view("prefill-0")], [view("decode-0")], facts)) == ("prefill-0", "")
    assert decide([], [view("decode-0")], facts).kind == "local"


def test_draining_and_frozen_workers_get_nothing() -> None:
    prefill = [view("prefill-0", available=False), view("prefill-1", queued_tokens=60)]
    decode = [view("decode-0", available=False), view("decode-1", kv_tokens=9000)]
    assert names(decide(prefill, decode)) == ("prefill-1", "decode-1")


def test_a_pair_with_other_pages_is_refused_by_the_name_of_the_field() -> None:
    odd = view("prefill-0", layout=fake_layout(page_size=8))
    choice = decide([odd], [view("decode-0")])
    assert choice.kind == "local"
    assert "page_size" in choice.reason
    assert names(decide([odd, view("prefill-1", queued_tokens=60)], [view("decode-0")]))[0] == "prefill-1"


def test_a_worker_that_refused_this_size_is_left_alone_but_not_for_smaller_ones() -> None:
    decode = [view("decode-0", full_from_tokens=100)]
    assert choose(FACTS, [view("prefill-0")], decode, WEIGHTS, Random(0)) == Wait("decode pages")
    decide([view("prefill-0")], decode, replace(FACTS, num_tokens=99))
    decide([view("prefill-0")], [*decode, view("decode-1", kv_tokens=900)])


def test_what_no_pool_can_hold_is_never_placed() -> None:
    facts = RequestFacts(num_tokens=100, total_tokens=257)
    assert isinstance(choose(facts, [view("prefill-0")], [view("decode-0")], WEIGHTS, Random(0)), Never)


def test_no_decode_worker_is_waited_for() -> None:
    decision = choose(FACTS, [view("prefill-0")], [], WEIGHTS, Random(0))
    assert decision == Wait("no decode worker", for_worker=True)


def test_workers_that_failed_the_request_are_avoided_unless_alone() -> None:
    facts = replace(FACTS, avoid=frozenset({life("prefill-0"), life("decode-0")}))
    prefill = [view("prefill-0"), view("prefill-1", queued_tokens=60)]
    assert names(decide(prefill, [view("decode-0")], facts)) == ("prefill-1", "decode-0")


def test_a_sibling_choice_goes_where_the_first_decodes() -> None:
    facts = replace(FACTS, prefer_decode=life("decode-1"))
    decode = [view("decode-0"), view("decode-1", kv_tokens=900, cached_tokens=96)]
    assert names(decide([view("prefill-0")], decode, facts)) == ("", "decode-1")
