"""Masks beside the forward pass: ready, broken, late and given up."""

import threading
from collections.abc import Sequence

from twostroke.cluster.core.ids import JobId, PageId, RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.masks import LIMIT_S, THREADS, MaskPool, RowMasks, compute_masks
from twostroke.engine.plan import Constraint, ConstraintBroken, Plan, SampleInput

PARAMS = SamplingParams(max_tokens=4, end_token_ids=(7,))


class Scripted:
    """A constraint that answers when it is let, or breaks."""

    def __init__(self, *, is_open: bool = True, fault: str = "") -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.left = threading.Event()
        self.fault = fault
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        if is_open:
            self.opened.set()

    def mask(self, output: Sequence[int], ends: Sequence[int]) -> bytes:
        self.calls.append((tuple(output), tuple(ends)))
        self.entered.set()
        assert self.opened.wait(10)
        self.left.set()
        if self.fault:
            raise ConstraintBroken(self.fault)
        return b"\x05"


def plan_of(*constraints: Constraint | None) -> Plan:
    """Rows that are sampled, and before them one that is not."""
    rows = len(constraints) + 1
    sample = [None, *(SampleInput(PARAMS, (1,), (2, 3), constraint) for constraint in constraints)]
    job = JobId(RequestId("a"), 0, 1)
    return Plan([job] * rows, [0] * rows, [1] * rows, [0] * rows, [[PageId(0)]] * rows, sample)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_no_grammar_no_thread() -> None:
    assert MaskPool().start(plan_of(None, None)) is None


def test_masks_are_of_their_rows_and_a_broken_one_breaks_no_other() -> None:
    good, bad = Scripted(), Scripted(fault="it broke")
    for masks in (compute_masks(plan_of(good, None, bad)), _wait(MaskPool(), plan_of(good, None, bad), good, bad)):
        assert masks.bits == {1: b"\x05"}
        assert masks.broken == {3: "it broke"}
        assert not masks.late
    assert good.calls == [((2, 3), (7,))] * 2


def _wait(pool: MaskPool, plan: Plan, *quick: Scripted, entered: Sequence[Scripted] = ()) -> RowMasks:
    """One step; its forward pass lasts until the masks of `quick` are there and those of `entered` under way."""
    for constraint in quick:
        constraint.left.clear()
    step = pool.start(plan)
    assert step is not None
    for constraint in quick:
        assert constraint.left.wait(10)
    for constraint in entered:
        assert constraint.entered.wait(10)
    return step.wait()


def test_a_slow_mask_is_late_and_computed_once() -> None:
    slow, quick = Scripted(is_open=False), Scripted()
    pool = MaskPool()
    masks = _wait(pool, plan_of(slow, quick), quick)
    assert masks.late == {1}
    assert masks.bits == {2: b"\x05"}
    # Steps without it do not begin it anew.
    assert _wait(pool, plan_of(quick), quick).bits == {1: b"\x05"}
    slow.opened.set()
    assert slow.left.wait(10)
    while (masks := _wait(pool, plan_of(slow))).late:
        pass
    assert masks.bits == {1: b"\x05"}
    assert len(slow.calls) == 1


def test_a_mask_that_takes_for_ever_is_broken() -> None:
    clock, slow = Clock(), Scripted(is_open=False)
    pool = MaskPool(clock)
    assert _wait(pool, plan_of(slow), entered=[slow]).late == {1}
    clock.now_s = LIMIT_S + 1
    masks = _wait(pool, plan_of(slow))
    assert not masks.late
    assert "took more than" in masks.broken[1]
    slow.opened.set()


def test_waiting_behind_the_masks_of_others_breaks_no_grammar() -> None:
    clock, slow, behind = Clock(), [Scripted(is_open=False) for _ in range(THREADS)], Scripted()
    pool = MaskPool(clock)
    assert _wait(pool, plan_of(*slow, behind), entered=slow).late == {1, 2, 3}
    clock.now_s = LIMIT_S + 1
    masks = _wait(pool, plan_of(*slow, behind))
    assert set(masks.broken) == {1, 2}
    assert masks.late == {3}
    for constraint in slow:
        constraint.opened.set()
