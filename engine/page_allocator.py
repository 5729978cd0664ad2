"""Who holds which page of the pool, and which pages have a name. Pure; the engine thread's alone.

Every page is in exactly one state, and `_move` is the only place that changes it:

    FREE --allocate--> ACTIVE --release--> FREE (unnamed) or CACHED (named)
    CACHED --retain--> ACTIVE              CACHED --evicted by allocate or lease--> ACTIVE or LEASED
    FREE --lease--> LEASED --commit_lease--> ACTIVE
                    LEASED --quarantine--> QUARANTINED --end_quarantine--> FREE

A page is named once all of its slots are computed and verified. Of two pages with equal content the first
named wins; the other stays private to its job and is freed with it. Cached pages are forgotten only when pages
are needed, least recently used first and, of those released together, children before their parents.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from twostroke.cluster.core.ids import PageId, PrefixKey
from twostroke.cluster.core.messages import Ledger


class OutOfPages(Exception):
    """Fewer pages are free or evictable than were asked for; nothing was changed."""


class PageState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"
    LEASED = "leased"
    QUARANTINED = "quarantined"


class NameChanges(NamedTuple):
    """Net changes of names since the last call; no key is in both."""

    stored: tuple[PrefixKey, ...]
    removed: tuple[PrefixKey, ...]


class PageAllocator:
    """Raises ValueError for a pool without pages; AssertionError when a caller breaks the life-cycle above."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError("a pool has at least one page")
        self._state = [PageState.FREE] * num_pages
        self._references = [0] * num_pages
        self._key_of: list[PrefixKey | None] = [None] * num_pages
        self._page_of: dict[PrefixKey, PageId] = {}
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._cached: dict[PageId, None] = {}
        """Insertion order is eviction order."""
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages
        self._changes: dict[PrefixKey, bool] = {}

    # --------------------------------------------------------------------------------------------- reading

    @property
    def num_pages(self) -> int:
        return len(self._state)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` or `lease` could hand out now: free and evictable ones."""
        return len(self._free) + len(self._cached)

    def count_cached(self, pages: Sequence[PageId]) -> int:
        """How many of `pages` are evictable now, and would not be once retained."""
        return sum(self._state[page] is PageState.CACHED for page in pages)

    def lookup(self, keys: Sequence[PrefixKey]) -> list[PageId]:
        """Pages of the longest leading run of `keys` that have names. Changes nothing."""
        pages: list[PageId] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def named_keys(self) -> tuple[PrefixKey, ...]:
        return tuple(self._page_of)

    def free_pages(self) -> tuple[PageId, ...]:
        return tuple(self._free)

    def ledger(self) -> Ledger:
        counts = self._counts
        return Ledger(
            free=counts[PageState.FREE],
            cached=counts[PageState.CACHED],
            active=counts[PageState.ACTIVE],
            leased=counts[PageState.LEASED],
            quarantined=counts[PageState.QUARANTINED],
        )

    # ------------------------------------------------------------------------------------------ references

    def allocate(self, count: int) -> list[PageId]:
        """`count` private pages with one reference each. Raises OutOfPages."""
        pages = self._take(count, PageState.ACTIVE)
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Sequence[PageId]) -> None:
        """One more reference on each named or active page."""
        for page in pages:
            if self._state[page] is PageState.CACHED:
                del self._cached[page]
                self._move(page, PageState.CACHED, PageState.ACTIVE)
            assert self._state[page] is PageState.ACTIVE, f"retain of page {page}, which is {self._state[page]}"
            self._references[page] += 1

    def release(self, pages: Sequence[PageId], keys: Sequence[PrefixKey] = ()) -> None:
        """Give back one reference on each page, first page of the prompt first.

        `keys` are the names of the leading pages, also where a twin bears the name: then the twin counts as used
        now, so that no parent is forgotten before its children.
        """
        for index in range(len(pages) - 1, -1, -1):
            page = pages[index]
            assert self._references[page] > 0, f"release of page {page}, which nobody holds"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._settle(page)
            if index < len(keys):
                named = self._page_of.get(keys[index])
                if named in self._cached:
                    del self._cached[named]
                    self._cached[named] = None

    def name(self, page: PageId, key: PrefixKey) -> bool:
        """Name an active, fully computed page; False when a twin has the name already or the page has one."""
        assert self._state[page] is PageState.ACTIVE, f"naming page {page}, which is {self._state[page]}"
        if key in self._page_of or self._key_of[page] is not None:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        self._changes[key] = True
        return True

    def take_changes(self) -> NameChanges:
        changes, self._changes = self._changes, {}
        return NameChanges(
            stored=tuple(key for key, stored in changes.items() if stored),
            removed=tuple(key for key, stored in changes.items() if not stored),
        )

    # ---------------------------------------------------------------------------------------------- leases

    def lease(self, count: int) -> list[PageId]:
        """`count` pages that a remote worker may write. Raises OutOfPages."""
        return self._take(count, PageState.LEASED)

    def commit_lease(self, pages: Sequence[PageId]) -> None:
        """Everything written is verified: the pages become private pages with one reference each."""
        for page in pages:
            self._move(page, PageState.LEASED, PageState.ACTIVE)
            self._references[page] = 1

    def quarantine(self, pages: Sequence[PageId]) -> None:
        """The lease ended, but a write may still land."""
        for page in pages:
            self._move(page, PageState.LEASED, PageState.QUARANTINED)

    def end_quarantine(self, pages: Sequence[PageId]) -> None:
        for page in pages:
            assert self._state[page] is PageState.QUARANTINED, f"page {page} is {self._state[page]}"
            self._settle(page)

    # --------------------------------------------------------------------------------------------- private

    def _take(self, count: int, to: PageState) -> list[PageId]:
        if count > self.num_available:
            raise OutOfPages(f"{count} pages wanted, {self.num_available} free or evictable")
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._move(page, PageState.FREE, to)
        return pages

    def _evict(self) -> None:
        page = next(iter(self._cached))
        del self._cached[page]
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None
        self._changes[key] = False
        self._settle(page)

    def _settle(self, page: PageId) -> None:
        """Nobody holds the page any more: the one place where pages become cached or free."""
        state = self._state[page]
        if self._key_of[page] is None:
            self._move(page, state, PageState.FREE)
            self._free.append(page)
        else:
            self._move(page, state, PageState.CACHED)
            self._cached[page] = None

    def _move(self, page: PageId, expected: PageState, to: PageState) -> None:
        assert self._state[page] is expected, f"page {page} is {self._state[page]}, not {expected}"
        self._state[page] = to
        self._counts[expected] -= 1
        self._counts[to] += 1

    def check_references(self, held: Mapping[int, int]) -> None:
        """Raise AssertionError unless `held`, the references that jobs know of, page by page, are all there are."""
        for page, references in enumerate(self._references):
            known = held.get(page, 0)
            assert references == known, f"page {page} has {references} references, its holders know of {known}"

    def check_integrity(self) -> None:
        """Raise AssertionError with what is wrong: each page in one state, and every index agreeing with it."""
        by_state: dict[PageState, set[PageId]] = {state: set() for state in PageState}
        for index, state in enumerate(self._state):
            by_state[state].add(PageId(index))
        for state, pages in by_state.items():
            assert len(pages) == self._counts[state], f"{state}: {len(pages)} pages, counted {self._counts[state]}"
        assert len(self._free) == len(set(self._free)), "a page is in the free list twice"
        assert set(self._free) == by_state[PageState.FREE], "free list and states differ"
        assert set(self._cached) == by_state[PageState.CACHED], "cached set and states differ"
        for index, references in enumerate(self._references):
            active = self._state[index] is PageState.ACTIVE
            assert (references > 0) == active, f"page {index}: {references} references, {self._state[index]}"
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, f"page {page} is found by a key that it does not bear"
            assert self._state[page] in (PageState.CACHED, PageState.ACTIVE), f"named page {page} is not held"
        num_named = sum(key is not None for key in self._key_of)
        assert num_named == len(self._page_of), "a page bears a key by which it is not found"
        assert all(self._key_of[page] is not None for page in self._cached), "a cached page has no name"
        assert self.ledger().total == self.num_pages, "pages are lost"
