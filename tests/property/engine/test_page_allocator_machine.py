"""Random lives of pages against a plain model: who holds what, and what is named."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twostroke.cluster.core.ids import PageId, PrefixKey
from twostroke.engine.page_allocator import OutOfPages, PageAllocator

CHAINS = [[PrefixKey(f"{chain}/{depth}".encode()) for depth in range(5)] for chain in range(4)]


class AllocatorMachine(RuleBasedStateMachine):
    """Holders take a prefix of one of four chains, as jobs do: cached pages first, then fresh ones."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(1)
        self.holders: list[tuple[list[PageId], list[PrefixKey], int]] = []
        self.leases: list[list[PageId]] = []
        self.quarantine: list[list[PageId]] = []
        self.names: set[PrefixKey] = set()

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 5), private=st.integers(0, 2), share=st.booleans())
    def hold(self, chain: list[PrefixKey], length: int, private: int, share: bool) -> None:
        held = self.allocator.lookup(chain[:length]) if share else []
        wanted = length - len(held) + private
        room = self.allocator.num_available - self.allocator.count_cached(held)
        self.allocator.retain(held)
        try:
            fresh = self.allocator.allocate(wanted)
        except OutOfPages:
            assert wanted > room
            self.allocator.release(held, chain[: len(held)])
            return
        assert wanted <= room
        self.holders.append((held + fresh, chain[:length], len(held)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def name_next(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        pages, keys, num_named = self.holders[index]
        if num_named < len(keys):
            self.allocator.name(pages[num_named], keys[num_named])
            self.holders[index] = (pages, keys, num_named + 1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages, keys, num_named = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.release(pages, keys[:num_named])

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        if count <= self.allocator.num_available:
            self.leases.append(self.allocator.lease(count))

    @precondition(lambda self: self.leases)
    @rule(committed=st.booleans())
    def end_lease(self, committed: bool) -> None:
        pages = self.leases.pop()
        if committed:
            self.allocator.commit_lease(pages)
            self.holders.append((pages, [], 0))
        else:
            self.allocator.quarantine(pages)
            self.quarantine.append(pages)

    @precondition(lambda self: self.quarantine)
    @rule()
    def end_quarantine(self) -> None:
        self.allocator.end_quarantine(self.quarantine.pop())

    @invariant()
    def adds_up(self) -> None:
        self.allocator.check_integrity()
        held: dict[int, int] = {}
        for pages, _, _ in self.holders:
            for page in pages:
                held[page] = held.get(page, 0) + 1
        self.allocator.check_references(held)
        ledger = self.allocator.ledger()
        assert ledger.leased == sum(map(len, self.leases))
        assert ledger.quarantined == sum(map(len, self.quarantine))

    @invariant()
    def events_tell_the_true_set_of_names(self) -> None:
        changes = self.allocator.take_changes()
        assert not set(changes.stored) & set(changes.removed)
        self.names = (self.names - set(changes.removed)) | set(changes.stored)
        assert self.names == set(self.allocator.named_keys())

    def teardown(self) -> None:
        for pages, keys, num_named in self.holders:
            self.allocator.release(pages, keys[:num_named])
        for pages in self.leases:
            self.allocator.quarantine(pages)
        for pages in self.leases + self.quarantine:
            self.allocator.end_quarantine(pages)
        self.allocator.check_integrity()
        assert self.allocator.ledger().at_rest


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
