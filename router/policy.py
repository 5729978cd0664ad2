"""Where a request goes. Pure: plain data in, a decision with its reason out (DESIGN.md 7).

    decode cost  = KV tokens in use and reserved + weight * running - tokens it already holds
    prefill cost = queued and running prefill tokens + (prompt - cached there) + weight * tokens to ship

The decode worker is chosen first, since what it holds decides what must be shipped, then the prefill worker among
those that share its page layout. When the load of a role is badly skewed (more than `balance_abs_tokens` between the
extremes, and over `balance_rel` times the smallest), affinity yields: cached tokens count for nothing in that choice.
Equal costs are drawn at random, so that several routers do not herd.

A prefill worker takes work only while its queue is under `max_queued_chunks` of its chunk budget; until then the
request waits in the router, where it can still go anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random

from twostroke.cluster.config import PolicySection
from twostroke.cluster.core.errors import LayoutMismatch
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.layout import check_compatible
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.core.records import dataclass


@dataclass(frozen=True, slots=True)
class RequestFacts:
    num_tokens: int
    """Tokens to compute before the next one can be sampled: prompt and delivered output."""
    total_tokens: int
    """The same plus all output that may still come: what a decode pool must be able to hold."""
    one_to_go: bool = False
    """The next token is the last: no decode worker is needed."""
    prefer_decode: Incarnation | None = None
    """Where a sibling choice decodes: it holds the prompt."""
    avoid: frozenset[Incarnation] = frozenset()
    """Workers that failed this request; used only when there is no other."""
    refused: frozenset[Incarnation] = frozenset()
    """Workers that can never take this request."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of one worker at this instant, seen from one request."""

    info: WorkerInfo
    queued_tokens: int = 0
    """Prompt tokens accepted and not computed, with what was just routed there."""
    kv_tokens: int = 0
    """Token slots of pages in use or leased, with what was just routed there."""
    running: int = 0
    cached_tokens: int = 0
    """Leading tokens of this request that it holds."""
    available: bool = True
    """Not draining, not stalled."""
    full_from_tokens: int | None = None
    """It has refused a request of this size since its last load report; a smaller one may still fit."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` and `decode`: a pair. Only `decode`: local prefill. Only `prefill`: a one-token answer."""

    prefill: WorkerInfo | None
    decode: WorkerInfo | None
    reason: str

    @property
    def kind(self) -> str:
        """`pair`, `local` or `one_token`."""
        if self.prefill is None:
            return "local"
        return "one_token" if self.decode is None else "pair"


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do now. `for_worker`: nobody is there at all, so that waiting may be in vain."""

    reason: str
    for_worker: bool = False


@dataclass(frozen=True, slots=True)
class Never:
    """No attached worker can ever take this request."""

    reason: str


Decision = Choice | Wait | Never


def choose(
    facts: RequestFacts,
    prefill: Sequence[WorkerView],
    decode: Sequence[WorkerView],
    weights: PolicySection,
    random: Random,
) -> Decision:
    """Does not change its inputs, except that ties draw from `random`."""
    if facts.one_to_go:
        alone = _one_token(facts, prefill, weights, random)
        if alone is not None:
            return alone
    able = [view for view in decode if view.info.max_context >= facts.total_tokens]
    able = [view for view in able if view.info.incarnation not in facts.refused]
    if decode and not able:
        return Never("larger than the pool of every decode worker")
    candidates = _unless_empty([view for view in able if view.available], facts.avoid)
    if not candidates:
        return Wait("no decode worker", for_worker=True)
    candidates = [view for view in candidates if _fits(facts, view)]
    if not candidates:
        return Wait("decode pages")
    preferred = [view for view in candidates if view.info.incarnation == facts.prefer_decode]
    target, why = _cheapest(
        preferred or candidates,
        cost=lambda view: view.kv_tokens + weights.decode_running_weight * view.running,
        load=lambda view: view.kv_tokens,
        weights=weights,
        random=random,
    )
    if preferred:
        why = "sibling"
    return _stroke(facts, target, why, prefill, weights, random)


def choose_prefill(
    facts: RequestFacts,
    target: WorkerInfo,
    held_tokens: int,
    prefill: Sequence[WorkerView],
    weights: PolicySection,
    random: Random,
) -> Choice | Wait:
    """The prefill worker for a lease on `target`; Wait when none can take it now."""
    compatible = [view for view in _able_to_prefill(facts, prefill) if mismatch(view.info, target) is None]
    candidates = _unless_empty(compatible, facts.avoid)
    if not candidates:
        return Wait(_no_prefill_reason(target, prefill), for_worker=True)
    open_ = [view for view in candidates if _takes_work(facts, view, weights)]
    if not open_:
        return Wait("prefill queues")
    ship = weights.transfer_weight * (facts.num_tokens - held_tokens)
    chosen, why = _cheapest(
        open_,
        cost=lambda view: view.queued_tokens + facts.num_tokens + ship,
        load=lambda view: view.queued_tokens,
        weights=weights,
        random=random,
    )
    return Choice(chosen.info, target, f"prefill {why}")


def mismatch(ours: WorkerInfo, theirs: WorkerInfo) -> str | None:
    """Why the two cannot exchange pages, by the name of the field; None when they can."""
    if ours.layout == theirs.layout:
        return None
    try:
        check_compatible(ours.layout, theirs.layout)
    except LayoutMismatch as error:
        return error.message
    return None


def _stroke(
    facts: RequestFacts,
    target: WorkerView,
    why: str,
    prefill: Sequence[WorkerView],
    weights: PolicySection,
    random: Random,
) -> Decision:
    """Local or pair, once the decode worker is known."""
    uncached = facts.num_tokens - target.cached_tokens
    if uncached < weights.local_threshold_tokens:
        return Choice(None, target.info, f"local: {uncached} tokens uncached, decode {why}")
    pair = choose_prefill(facts, target.info, target.cached_tokens, prefill, weights, random)
    if isinstance(pair, Choice):
        return Choice(pair.prefill, pair.decode, f"{pair.reason}, decode {why}")
    if pair.for_worker and weights.local_when_no_prefill:
        return Choice(None, target.info, f"local: {pair.reason}, decode {why}")
    return pair


def _one_token(
    facts: RequestFacts, prefill: Sequence[WorkerView], weights: PolicySection, random: Random
) -> Decision | None:
    """A prefill worker alone; None when there is none, so that a decode worker must do it."""
    candidates = _unless_empty(_able_to_prefill(facts, prefill), facts.avoid)
    if not candidates:
        return None
    open_ = [view for view in candidates if _takes_work(facts, view, weights)]
    if not open_:
        return Wait("prefill queues")
    chosen, why = _cheapest(
        open_,
        cost=lambda view: view.queued_tokens + facts.num_tokens,
        load=lambda view: view.queued_tokens,
        weights=weights,
        random=random,
    )
    return Choice(chosen.info, None, f"one token: prefill {why}")


def _cheapest(
    views: Sequence[WorkerView],
    *,
    cost: Callable[[WorkerView], float],
    load: Callable[[WorkerView], int],
    weights: PolicySection,
    random: Random,
) -> tuple[WorkerView, str]:
    loads = [load(view) for view in views]
    low, high = min(loads), max(loads)
    skewed = high - low > weights.balance_abs_tokens and high > weights.balance_rel * low
    credit = 0 if skewed else 1
    costs = [cost(view) - credit * view.cached_tokens for view in views]
    best = min(costs)
    chosen = random.choice([view for view, price in zip(views, costs, strict=True) if price == best])
    if skewed:
        return chosen, "by load guard"
    if chosen.cached_tokens:
        return chosen, f"by cost, {chosen.cached_tokens} cached"
    return chosen, "by cost"


def _able_to_prefill(facts: RequestFacts, prefill: Iterable[WorkerView]) -> list[WorkerView]:
    return [
        view
        for view in prefill
        if view.available and view.info.max_context >= facts.num_tokens and view.info.incarnation not in facts.refused
    ]


def _takes_work(facts: RequestFacts, view: WorkerView, weights: PolicySection) -> bool:
    return _fits(facts, view) and view.queued_tokens < weights.max_queued_chunks * view.info.chunk_tokens


def _fits(facts: RequestFacts, view: WorkerView) -> bool:
    return view.full_from_tokens is None or facts.num_tokens < view.full_from_tokens


def _unless_empty(views: list[WorkerView], avoid: frozenset[Incarnation]) -> list[WorkerView]:
    return [view for view in views if view.info.incarnation not in avoid] or views


def _no_prefill_reason(target: WorkerInfo, prefill: Sequence[WorkerView]) -> str:
    for view in prefill:
        difference = mismatch(view.info, target)
        if view.available and difference is not None:
            return f"no prefill worker with the same pages ({view.info.worker_id}: {difference})"
    return "no prefill worker"
