"""Whatever order chunks, renewals and ends come in, a commit means that every page was verified in this epoch."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.transfer_builders import DecodeSide, commit_of, make_lease, renewed, write_of
from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.transport.base import WriteTicket

NUM_PAGES = 5


class LeaseBookMachine(RuleBasedStateMachine):
    """One lease against a plain model: the set of verified pages, and the set of pages under way."""

    def __init__(self) -> None:
        super().__init__()
        self.side = DecodeSide()
        self.lease = make_lease(list(range(NUM_PAGES)))
        self.side.book.open(self.lease)
        self.verified: set[int] = set()
        self.writes: list[WriteTicket] = []
        self.landing: list[WriteTicket] = []
        self.committed = False
        self.closed = False

    def under_way(self) -> set[int]:
        return {
            page
            for ticket in self.writes
            if ticket in self.landing or ticket.write.epoch == self.lease.epoch
            for page in range(ticket.write.first, ticket.write.first + ticket.write.count)
        }

    @rule(first=st.integers(0, NUM_PAGES), count=st.integers(0, NUM_PAGES), old=st.booleans())
    def begin(self, first: int, count: int, old: bool) -> None:
        stale = old and self.lease.epoch > 0
        write = write_of(self.lease, first, count)
        if stale:
            write = type(write)(write.lease_id, write.epoch - 1, write.nonce, first, count)
        pages = set(range(first, first + count))
        legal = (
            not stale
            and not self.committed
            and not self.closed
            and first + count <= NUM_PAGES
            and not pages & self.under_way()
        )
        try:
            ticket = self.side.book.begin(write)
        except TransferFailed:
            assert not legal
            return
        assert legal
        self.verified -= pages
        self.writes.append(ticket)

    @precondition(lambda self: self.writes)
    @rule(index=st.integers(0, 10))
    def land(self, index: int) -> None:
        ticket = self.writes[index % len(self.writes)]
        legal = not self.closed and ticket.write.epoch == self.lease.epoch
        try:
            self.side.book.land(ticket)
        except TransferFailed:
            assert not legal
            return
        assert legal
        if ticket not in self.landing:
            self.landing.append(ticket)

    @precondition(lambda self: self.writes)
    @rule(index=st.integers(0, 10), landed=st.booleans())
    def end(self, index: int, landed: bool) -> None:
        ticket = self.writes.pop(index % len(self.writes))
        verified = landed and ticket in self.landing
        if ticket in self.landing:
            self.landing.remove(ticket)
        self.side.book.end(ticket, verified)
        if verified and ticket.write.epoch == self.lease.epoch:
            self.verified |= set(range(ticket.write.first, ticket.write.first + ticket.write.count))

    @rule()
    def commit(self) -> None:
        legal = self.committed or (not self.closed and self.verified == set(range(NUM_PAGES)) and not self.under_way())
        try:
            self.side.book.commit(commit_of(self.lease))
        except TransferFailed:
            assert not legal
            return
        assert legal
        self.committed = True

    @precondition(lambda self: not self.closed and not self.committed)
    @rule()
    def renew(self) -> None:
        self.lease = renewed(self.lease)
        self.side.book.open(self.lease)
        self.verified.clear()

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.side.book.close(self.lease.lease_id, self.committed)
        self.closed = True

    @invariant()
    def told_the_engine_exactly_once(self) -> None:
        assert len(self.side.committed) == int(self.committed)
        over = self.closed and not self.committed and not self.landing
        assert len(self.side.released) == int(over)
        assert self.side.book.num_writes == len(self.writes)
        assert self.side.book.num_open == int(not self.closed or bool(self.writes))

    def teardown(self) -> None:
        if not self.closed:
            self.close()
        while self.writes:
            self.end(0, True)
        self.told_the_engine_exactly_once()
        self.side.assert_at_rest()


TestLeaseBook = LeaseBookMachine.TestCase
TestLeaseBook.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
