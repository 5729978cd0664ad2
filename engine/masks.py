"""The masks of a step: which tokens each row's grammar allows. Computed beside the forward pass; no torch.

    launch   `start`: every constrained row's mask is begun on a thread of its own
    result   `wait`, after the forward pass: what is ready is used. A row whose mask is not is late: it has no token in
             this step and takes part in the next, while its mask goes on being computed. After `LIMIT_S` it is broken.

Rows that need no mask wait once for those of others, `GRACE_S` at most: what was late before gets none.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from twostroke.engine.plan import Constraint, ConstraintBroken, Plan, SampleInput

GRACE_S = 0.004
"""How long a step waits for new masks. A usual one takes 0.2 ms and is ready long before the forward pass."""
ALONE_S = 0.02
"""How long a step waits when every row of it needs a mask that is not ready: it would do nothing else."""
LIMIT_S = 5.0
"""Of work on one mask."""
THREADS = 2


@dataclass(frozen=True, slots=True)
class RowMasks:
    """By row of the plan. A row in none of them has no grammar, or is not sampled."""

    bits: dict[int, bytes] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()


NO_MASKS = RowMasks()


def compute_masks(plan: Plan) -> RowMasks:
    """All of them, here and now."""
    masks = RowMasks()
    for row, item in _constrained(plan):
        try:
            masks.bits[row] = _mask(item)
        except ConstraintBroken as error:
            masks.broken[row] = str(error)
    return masks


class Begun:
    """One row's mask on its way. Made on the engine thread, computed on another."""

    def __init__(self, item: SampleInput, threads: ThreadPoolExecutor, clock: Callable[[], float]) -> None:
        self.is_new = True
        self._clock = clock
        self._started_s = math.inf
        """Set by the thread that computes it: waiting for one is not the grammar's fault."""
        self.future = threads.submit(self._compute, item)

    def _compute(self, item: SampleInput) -> bytes:
        self._started_s = self._clock()
        return _mask(item)

    @property
    def is_overdue(self) -> bool:
        return self._clock() - self._started_s > LIMIT_S


class MaskPool:
    """Used by one engine thread. Threads are started when the first grammar comes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._late: dict[Constraint, Begun] = {}
        """Masks that were late the last time."""

    def start(self, plan: Plan) -> "StepMasks | None":
        """None when no row has a grammar."""
        rows = _constrained(plan)
        if not rows:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        begun: dict[int, Begun] = {}
        for row, item in rows:
            assert item.constraint is not None
            late = self._late.pop(item.constraint) if item.constraint in self._late else None
            begun[row] = late or Begun(item, self._threads, self._clock)
        # Those whose jobs have ended or wait: a state is not touched while a thread works on it.
        self._late = {constraint: entry for constraint, entry in self._late.items() if not entry.future.done()}
        constraints = {row: item.constraint for row, item in rows if item.constraint is not None}
        return StepMasks(self._late, constraints, begun, len(plan.jobs))


class StepMasks:
    """Of one step; `wait` is called once, on the engine thread, before the next `start`."""

    def __init__(
        self, late: dict[Constraint, Begun], constraints: dict[int, Constraint], begun: dict[int, Begun], num_rows: int
    ) -> None:
        self._late = late
        self._constraints = constraints
        self._begun = begun
        self._num_rows = num_rows

    def wait(self) -> RowMasks:
        self._give_grace()
        masks = RowMasks()
        late: set[int] = set()
        for row, begun in self._begun.items():
            if begun.future.done():
                try:
                    masks.bits[row] = begun.future.result()
                except ConstraintBroken as error:
                    masks.broken[row] = str(error)
            elif begun.is_overdue:
                masks.broken[row] = f"its grammar took more than {LIMIT_S:g} s for one token"
            else:
                begun.is_new = False
                self._late[self._constraints[row]] = begun
                late.add(row)
        return RowMasks(masks.bits, masks.broken, frozenset(late))

    def _give_grace(self) -> None:
        pending = [begun for begun in self._begun.values() if not begun.future.done()]
        if len(pending) == self._num_rows:
            wait([begun.future for begun in pending], ALONE_S)
        else:
            wait([begun.future for begun in pending if begun.is_new], GRACE_S)


def _constrained(plan: Plan) -> list[tuple[int, SampleInput]]:
    return [(row, item) for row, item in enumerate(plan.sample) if item is not None and item.constraint is not None]


def _mask(item: SampleInput) -> bytes:
    assert item.constraint is not None
    return item.constraint.mask(item.output, item.params.end_token_ids)
