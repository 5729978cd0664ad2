"""Which worker holds which leading pages: each incarnation's set of prefix keys, folded from its numbered batches.

Life of one worker's set:
  1. `add` at sequence 0 (nothing known). Batches in order are folded; repeats are dropped; later ones wait.
  2. A gap, a reported sequence that stays ahead for `LAG_S`, or an impossible size makes the set *stale*:
     `due` names it (at most `MAX_SNAPSHOTS` at once, not again within `SNAPSHOT_INTERVAL_S`).
  3. `apply_snapshot` replaces the set at the snapshot's own sequence and goes on with the batches that waited;
     a snapshot older than what is known is dropped. `snapshot_failed` lets another try come.
  4. `remove` at the worker's loss drops all of it; later batches of that incarnation are ignored.

A prompt that was just routed is credited at once (`expect`), for `EXPECT_S` to twice that: the worker will publish its
pages, or not; so a burst of siblings lands together. A refusal takes the credit back. Memory is bounded: a set by the
worker's pool, waiting batches and expected keys by constants. A wrong index costs speed, never a wrong answer
(invariant 16).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, PrefixKey

LAG_S = 1.0
MAX_SNAPSHOTS = 2
SNAPSHOT_INTERVAL_S = 2.0
MAX_WAITING_BATCHES = 1024
EXPECT_S = 5.0
MAX_EXPECTED = 32_768
"""Keys of each of the two sets, and those of one prompt."""


@dataclass(slots=True)
class _Holdings:
    max_keys: int
    sequence: int = 0
    keys: set[PrefixKey] = field(default_factory=set)
    waiting: dict[int, PrefixBatch] = field(default_factory=dict)
    expected: set[PrefixKey] = field(default_factory=set)
    """Since `expecting_since`; a set takes the keys of a long prompt at once."""
    expected_before: set[PrefixKey] = field(default_factory=set)
    """In the `EXPECT_S` before that."""
    expecting_since: float = 0.0
    behind_since: float | None = None
    broken: bool = False
    fetching: bool = False
    last_fetch: float | None = None


class PrefixIndex:
    """One event loop's; no I/O, time is passed in as monotonic seconds."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Holdings] = {}
        self.num_snapshots = 0

    def add(self, incarnation: Incarnation, num_pages: int) -> None:
        """Idempotent. `num_pages` bounds the set: a worker cannot name more pages than it has."""
        self._workers.setdefault(incarnation, _Holdings(max_keys=num_pages))

    def remove(self, incarnation: Incarnation) -> None:
        self._workers.pop(incarnation, None)

    def cursors(self) -> dict[Incarnation, int]:
        """The last sequence known of each worker: where to go on reading."""
        return {
            incarnation: max(holdings.waiting, default=holdings.sequence)
            for incarnation, holdings in self._workers.items()
        }

    def apply(self, batch: PrefixBatch) -> None:
        """Fold a batch. Unknown workers and repeats are ignored."""
        holdings = self._workers.get(batch.incarnation)
        if holdings is None or batch.sequence <= holdings.sequence:
            return
        holdings.waiting[batch.sequence] = batch
        _advance(holdings)
        if len(holdings.waiting) > MAX_WAITING_BATCHES:
            # Older ones first: the snapshot that heals the gap most likely covers them.
            del holdings.waiting[min(holdings.waiting)]

    def observe(self, incarnation: Incarnation, sequence: int, now: float) -> None:
        """The worker says that it has published up to `sequence`."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return
        if sequence <= holdings.sequence:
            holdings.behind_since = None
        elif holdings.behind_since is None:
            holdings.behind_since = now

    def due(self, now: float) -> list[Incarnation]:
        """Workers whose snapshot is to be fetched now; each is then being fetched until one of the two answers."""
        room = MAX_SNAPSHOTS - sum(holdings.fetching for holdings in self._workers.values())
        found: list[Incarnation] = []
        for incarnation, holdings in self._workers.items():
            if len(found) >= room:
                break
            if not holdings.fetching and _stale(holdings, now):
                holdings.fetching = True
                holdings.last_fetch = now
                found.append(incarnation)
        return found

    def apply_snapshot(self, snapshot: PrefixSnapshot) -> None:
        holdings = self._workers.get(snapshot.incarnation)
        if holdings is None:
            return
        holdings.fetching = False
        self.num_snapshots += 1
        if snapshot.sequence < holdings.sequence:
            return
        holdings.keys = set(snapshot.keys)
        holdings.sequence = snapshot.sequence
        holdings.waiting = {number: batch for number, batch in holdings.waiting.items() if number > snapshot.sequence}
        holdings.behind_since = None
        holdings.broken = False
        _advance(holdings)

    def snapshot_failed(self, incarnation: Incarnation) -> None:
        holdings = self._workers.get(incarnation)
        if holdings is not None:
            holdings.fetching = False

    def expect(self, incarnation: Incarnation, keys: Sequence[PrefixKey], now: float) -> None:
        """Credit pages that a request just routed there will produce."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return
        _age(holdings, now)
        holdings.expected.update(keys)

    def forget_expected(self, incarnation: Incarnation, keys: Sequence[PrefixKey]) -> None:
        """It refused, so it will not produce them: else the next try takes them for cached and prefills there."""
        holdings = self._workers.get(incarnation)
        if holdings is not None:
            holdings.expected.difference_update(keys)
            holdings.expected_before.difference_update(keys)

    def match(self, incarnation: Incarnation, keys: Sequence[PrefixKey], now: float) -> int:
        """How many leading `keys` the worker holds, or is about to. 0 for an unknown worker."""
        holdings = self._workers.get(incarnation)
        if holdings is None:
            return 0
        _age(holdings, now)
        for count, key in enumerate(keys):
            if key not in holdings.keys and key not in holdings.expected and key not in holdings.expected_before:
                return count
        return len(keys)

    def known(self, incarnation: Incarnation) -> frozenset[PrefixKey]:
        """The folded set, without what is only expected."""
        holdings = self._workers.get(incarnation)
        return frozenset() if holdings is None else frozenset(holdings.keys)

    @property
    def num_keys(self) -> int:
        return sum(len(holdings.keys) for holdings in self._workers.values())


def _age(holdings: _Holdings, now: float) -> None:
    """Drop what was expected long ago, or is too much."""
    since = holdings.expecting_since
    if now - since >= 2 * EXPECT_S:
        holdings.expected_before, holdings.expected, holdings.expecting_since = set(), set(), now
    elif now - since >= EXPECT_S or len(holdings.expected) > MAX_EXPECTED:
        holdings.expected_before, holdings.expected = holdings.expected, set()
        holdings.expecting_since = min(now, since + EXPECT_S)


def _advance(holdings: _Holdings) -> None:
    """Fold the waiting batches that follow on what is known."""
    while (batch := holdings.waiting.pop(holdings.sequence + 1, None)) is not None:
        if batch.cleared:
            holdings.keys.clear()
        holdings.keys.difference_update(batch.removed)
        holdings.keys.update(batch.stored)
        holdings.sequence = batch.sequence
    if len(holdings.keys) > holdings.max_keys:
        holdings.keys.clear()
        holdings.broken = True


def _stale(holdings: _Holdings, now: float) -> bool:
    if holdings.last_fetch is not None and now - holdings.last_fetch < SNAPSHOT_INTERVAL_S:
        return False
    lagging = holdings.behind_since is not None and now - holdings.behind_since > LAG_S
    return lagging or holdings.broken or bool(holdings.waiting)
