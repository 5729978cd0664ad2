"""The index against a worker's true set, under loss, duplication, reordering, clears and rejoining."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, PrefixKey
from twostroke.router.index import (
    EXPECT_S,
    LAG_S,
    MAX_EXPECTED,
    MAX_SNAPSHOTS,
    MAX_WAITING_BATCHES,
    SNAPSHOT_INTERVAL_S,
    PrefixIndex,
)

WORKERS = tuple(Incarnation(f"w{number}") for number in range(3))
NUM_PAGES = 40
numbers = st.sets(st.integers(0, 20), max_size=4)
workers = st.sampled_from(WORKERS)


def key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(16, "little"))


class IndexMachine(RuleBasedStateMachine):
    """The truth is a plain set and a sequence number a worker; a network loses, repeats and reorders batches."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.now = 0.0
        self.truth: dict[Incarnation, set[PrefixKey]] = {}
        self.sequence: dict[Incarnation, int] = {}
        self.network: list[PrefixBatch] = []
        self.delivered: list[PrefixBatch] = []
        for worker in WORKERS:
            self.join(worker)

    def join(self, worker: Incarnation) -> None:
        self.truth[worker], self.sequence[worker] = set(), 0
        self.index.add(worker, NUM_PAGES)

    @rule(worker=workers, stored=numbers, removed=numbers, cleared=st.booleans())
    def change(self, worker: Incarnation, stored: set[int], removed: set[int], cleared: bool) -> None:
        self.sequence[worker] += 1
        truth = set() if cleared else self.truth[worker]
        new, old = tuple(key(number) for number in stored), tuple(key(number) for number in removed)
        self.truth[worker] = truth.difference(old).union(new)
        self.network.append(PrefixBatch(worker, self.sequence[worker], new, old, cleared))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        if self.network:
            batch = self.network.pop(data.draw(st.integers(0, min(2, len(self.network) - 1))))
            self.index.apply(batch)
            self.delivered.append(batch)

    @rule()
    def lose(self) -> None:
        if self.network:
            self.network.pop(0)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        if self.delivered:
            self.index.apply(data.draw(st.sampled_from(self.delivered)))

    @rule(worker=workers)
    def report(self, worker: Incarnation) -> None:
        self.index.observe(worker, self.sequence[worker], self.now)

    @rule(worker=workers)
    def leave_and_join(self, worker: Incarnation) -> None:
        """A new life would have another name; here the same name forgets all that was under way."""
        self.index.remove(worker)
        assert self.index.match(worker, [key(1)], self.now) == 0
        self.network = [batch for batch in self.network if batch.incarnation != worker]
        self.delivered = [batch for batch in self.delivered if batch.incarnation != worker]
        self.join(worker)

    @rule()
    def resync(self) -> None:
        """Whatever happened: report, wait, answer the snapshots asked for, and the index equals the truth."""
        for _ in range(len(WORKERS)):
            for worker in WORKERS:
                self.index.observe(worker, self.sequence[worker], self.now)
            self.now += max(LAG_S, SNAPSHOT_INTERVAL_S) + 0.1
            due = self.index.due(self.now)
            assert len(due) <= MAX_SNAPSHOTS
            for worker in due:
                keys = tuple(sorted(self.truth[worker]))
                self.index.apply_snapshot(PrefixSnapshot(worker, self.sequence[worker], keys))
        for worker in WORKERS:
            assert self.index.known(worker) == self.truth[worker]
            self.index.observe(worker, self.sequence[worker], self.now)
        self.now += 10
        assert self.index.due(self.now) == []

    @invariant()
    def bounded(self) -> None:
        assert self.index.num_keys <= len(WORKERS) * NUM_PAGES
        assert all(cursor <= self.sequence[worker] for worker, cursor in self.index.cursors().items())


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def index_of_one(num_pages: int = NUM_PAGES) -> PrefixIndex:
    index = PrefixIndex()
    index.add(WORKERS[0], num_pages)
    return index


def test_only_leading_pages_match() -> None:
    index = index_of_one()
    index.apply(PrefixBatch(WORKERS[0], 1, stored=(key(1), key(3))))
    assert index.match(WORKERS[0], [key(1), key(2), key(3)], 0.0) == 1
    assert index.match(WORKERS[0], [key(2), key(3)], 0.0) == 0
    assert index.match(Incarnation("unknown"), [key(1)], 0.0) == 0


def test_what_was_just_routed_is_credited_for_a_while() -> None:
    index = index_of_one()
    index.expect(WORKERS[0], [key(1), key(2)], now=0.0)
    assert index.match(WORKERS[0], [key(1), key(2), key(3)], now=1.0) == 2
    assert index.match(WORKERS[0], [key(1), key(2)], now=100.0) == 0


@given(st.lists(st.tuples(st.floats(0.01, 2 * EXPECT_S), st.integers(0, 30)), max_size=30))
def test_a_credit_lasts_as_long_as_promised(steps: list[tuple[float, int]]) -> None:
    index, now, credited = index_of_one(), 1000.0, dict[int, float]()
    for seconds, number in steps:
        now += seconds
        index.expect(WORKERS[0], [key(number)], now)
        credited[number] = now
        for known, since in credited.items():
            held = index.match(WORKERS[0], [key(known)], now)
            assert held or now - since >= EXPECT_S
            assert not held or now - since < 2 * EXPECT_S


def test_what_is_expected_is_bounded() -> None:
    index = index_of_one()
    for number in range(5 * MAX_EXPECTED):
        index.expect(WORKERS[0], [key(number)], now=0.0)
    held = sum(index.match(WORKERS[0], [key(number)], now=0.0) for number in range(5 * MAX_EXPECTED))
    assert MAX_EXPECTED <= held <= 2 * MAX_EXPECTED + 2
    assert index.match(WORKERS[0], [key(5 * MAX_EXPECTED - 1)], now=0.0)


def test_waiting_batches_are_bounded_and_a_gap_is_healed_once() -> None:
    index = index_of_one()
    for sequence in range(2, 2 * MAX_WAITING_BATCHES):
        index.apply(PrefixBatch(WORKERS[0], sequence, stored=(key(sequence % 20),)))
    assert index.due(0.0) == [WORKERS[0]]
    assert index.due(100.0) == []
    index.apply_snapshot(PrefixSnapshot(WORKERS[0], 2 * MAX_WAITING_BATCHES - 1, (key(5),)))
    assert index.known(WORKERS[0]) == {key(5)}
    assert index.due(200.0) == []


def test_a_failed_snapshot_is_asked_for_again_after_a_pause() -> None:
    index = index_of_one()
    index.apply(PrefixBatch(WORKERS[0], 5))
    assert index.due(0.0) == [WORKERS[0]]
    index.snapshot_failed(WORKERS[0])
    assert index.due(0.1) == []
    assert index.due(SNAPSHOT_INTERVAL_S + 0.1) == [WORKERS[0]]


def test_an_impossible_set_is_thrown_away_and_fetched() -> None:
    index = index_of_one(num_pages=2)
    index.apply(PrefixBatch(WORKERS[0], 1, stored=(key(1), key(2), key(3))))
    assert index.known(WORKERS[0]) == frozenset()
    assert index.due(0.0) == [WORKERS[0]]


def test_a_refusal_takes_the_credit_back_and_leaves_what_is_really_held() -> None:
    index = PrefixIndex()
    index.add(WORKERS[0], NUM_PAGES)
    index.apply(PrefixBatch(WORKERS[0], 1, (key(1),), (), False))
    index.expect(WORKERS[0], [key(1), key(2), key(3)], now=0.0)
    index.forget_expected(WORKERS[0], [key(1), key(2), key(3)])
    assert index.match(WORKERS[0], [key(1), key(2), key(3)], now=0.0) == 1
    index.forget_expected(WORKERS[1], [key(1)])
