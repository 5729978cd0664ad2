"""The allocator's life-cycle: names, references, eviction order, leases, quarantine."""

import pytest

from twostroke.cluster.core.ids import PageId, PrefixKey
from twostroke.cluster.core.messages import Ledger
from twostroke.engine.page_allocator import NameChanges, OutOfPages, PageAllocator


def keys(*names: str) -> list[PrefixKey]:
    return [PrefixKey(name.encode()) for name in names]


def cached_chain(allocator: PageAllocator, *names: str) -> list[PageId]:
    """A named prefix that nobody holds."""
    pages = allocator.allocate(len(names))
    for page, key in zip(pages, keys(*names), strict=True):
        allocator.name(page, key)
    allocator.release(pages, keys(*names))
    return pages


def test_unnamed_pages_are_free_after_release_and_named_ones_cached() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    allocator.name(pages[0], keys("a")[0])
    assert allocator.ledger() == Ledger(free=1, cached=0, active=3, leased=0, quarantined=0)
    allocator.release(pages, keys("a"))
    assert allocator.ledger() == Ledger(free=3, cached=1, active=0, leased=0, quarantined=0)
    assert allocator.lookup(keys("a", "b")) == [pages[0]]
    allocator.check_integrity()


def test_a_page_is_held_until_its_last_reference_is_released() -> None:
    allocator = PageAllocator(4)
    [page] = cached_chain(allocator, "a")
    allocator.retain([page])
    allocator.retain([page])
    allocator.release([page], keys("a"))
    assert allocator.ledger().active == 1
    allocator.release([page], keys("a"))
    assert allocator.ledger().at_rest


def test_releasing_twice_is_our_own_bug() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="nobody holds"):
        allocator.release(pages)


def test_children_are_evicted_before_their_parents_and_old_prefixes_before_new_ones() -> None:
    allocator = PageAllocator(4)
    cached_chain(allocator, "old", "old-child")
    cached_chain(allocator, "new", "new-child")
    evicted: list[PrefixKey] = []
    for _ in range(4):
        allocator.take_changes()
        allocator.allocate(1)
        evicted += allocator.take_changes().removed
    assert evicted == keys("old-child", "old", "new-child", "new")


def test_nothing_is_evicted_while_free_pages_are_enough() -> None:
    allocator = PageAllocator(4)
    cached_chain(allocator, "a", "b")
    allocator.allocate(2)
    assert len(allocator.lookup(keys("a", "b"))) == 2


def test_use_makes_a_prefix_young() -> None:
    allocator = PageAllocator(2)
    [old] = cached_chain(allocator, "old")
    cached_chain(allocator, "new")
    allocator.retain([old])
    allocator.release([old], keys("old"))
    allocator.allocate(1)
    assert allocator.named_keys() == (b"old",)


def test_the_first_of_two_twins_has_the_name_and_counts_as_used_with_the_other() -> None:
    allocator = PageAllocator(4)
    first = cached_chain(allocator, "parent")
    cached_chain(allocator, "stranger")
    twin, child = allocator.allocate(2)
    assert not allocator.name(twin, keys("parent")[0])
    assert allocator.name(child, keys("child")[0])
    allocator.release([twin, child], keys("parent", "child"))
    assert allocator.lookup(keys("parent", "child")) == [*first, child]
    assert allocator.ledger() == Ledger(free=1, cached=3, active=0, leased=0, quarantined=0)
    allocator.allocate(3)  # takes the free page, then the stranger, then the child: the parent is last
    assert allocator.named_keys() == (b"parent",)


def test_asking_for_too_much_changes_nothing() -> None:
    allocator = PageAllocator(3)
    cached_chain(allocator, "a", "b")
    allocator.take_changes()
    for ask in (allocator.allocate, allocator.lease):
        with pytest.raises(OutOfPages):
            ask(4)
    assert allocator.ledger() == Ledger(free=1, cached=2, active=0, leased=0, quarantined=0)
    assert allocator.take_changes() == NameChanges((), ())


def test_changes_are_net() -> None:
    allocator = PageAllocator(1)
    cached_chain(allocator, "gone")
    allocator.allocate(1)
    assert allocator.take_changes() == NameChanges(stored=(), removed=tuple(keys("gone")))
    allocator.release([PageId(0)])
    cached_chain(allocator, "back")
    allocator.take_changes()
    pages = allocator.allocate(1)
    allocator.name(pages[0], keys("back")[0])
    assert allocator.take_changes() == NameChanges(stored=tuple(keys("back")), removed=())


def test_a_lease_is_committed_or_quarantined() -> None:
    allocator = PageAllocator(4)
    kept, lost = allocator.lease(2), allocator.lease(2)
    assert allocator.ledger().leased == 4
    allocator.commit_lease(kept)
    allocator.quarantine(lost)
    assert allocator.ledger() == Ledger(free=0, cached=0, active=2, leased=0, quarantined=2)
    with pytest.raises(OutOfPages):
        allocator.allocate(1)
    allocator.end_quarantine(lost)
    allocator.release(kept)
    assert allocator.ledger().free == 4
    allocator.check_integrity()


@pytest.mark.parametrize("operation", ["commit_lease", "quarantine", "end_quarantine", "retain"])
def test_free_pages_take_part_in_nothing(operation: str) -> None:
    with pytest.raises(AssertionError):
        getattr(PageAllocator(1), operation)([PageId(0)])


def test_a_leased_page_cannot_be_named() -> None:
    allocator = PageAllocator(1)
    [page] = allocator.lease(1)
    with pytest.raises(AssertionError, match="naming"):
        allocator.name(page, keys("a")[0])
