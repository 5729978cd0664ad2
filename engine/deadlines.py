"""Deadlines by key, earliest first. Pure: the caller brings the time."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline a key. Moving or discarding one is cheap: its old entry stays in the heap and is
    skipped later; the heap is rebuilt when such entries outnumber the live ones.
    """

    def __init__(self) -> None:
        self._at: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at_s: float) -> None:
        self._serial += 1
        self._at[key] = (at_s, self._serial)
        heapq.heappush(self._heap, (at_s, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, serial, live) for live, (at, serial) in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._at.pop(key, None)

    def next_s(self) -> float | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_s: float) -> list[K]:
        """Remove and return the keys whose deadline is at or before `now_s`."""
        expired: list[K] = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            expired.append(key)
        return expired

    def _drop_stale(self) -> None:
        while self._heap:
            at_s, serial, key = self._heap[0]
            if self._at.get(key) == (at_s, serial):
                return
            heapq.heappop(self._heap)
