"""The router's queue: admitted and not yet placed. Pure; time is passed in as monotonic seconds.

Life of an entry:
  1. `offer` takes a new request, or refuses it: the queue is full, or the wait that recent placements predict is
     longer than the time it has left. Both carry a Retry-After computed from that rate. Its place is by arrival and
     priority: a step of priority is worth `PRIORITY_STEP_S` of waiting, so that what is put off still has its turn.
  2. `take` walks from the head and asks `place` for each entry; a placed entry leaves. An entry that is blocked keeps
     its position; later ones may pass it only if they are smaller, and at most `reserve_skip` of them in all, so
     that a large request cannot starve.
  3. `put_back` returns an entry to where its arrival places it: refused for lack of pages, or a continuation, which
     stands before all new requests.
  4. `remove`: cancelled or out of time.
An entry that asks a worker for pages (`Placed.ASKED`) is out of the walk, but counts as waiting until `settle` says
that it got them, or `put_back` or `remove` ends the asking: else a full queue looks free each time one asks in vain.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from twostroke.cluster.core.errors import Overloaded

RATE_WINDOW_S = 30.0
MAX_RATE_SAMPLES = 1024
MAX_RETRY_AFTER_S = 60.0
PRIORITY_STEP_S = 1.0
MAX_SCAN = 16
"""Entries that one `take` looks at behind the first blocked one."""

Item = TypeVar("Item")


class Placed(Enum):
    PLACED = "placed"
    ASKED = "asked"
    """It has asked a worker, which may refuse."""
    BLOCKED = "blocked"
    """It waits for pages or for a worker; smaller ones may try."""
    HELD = "held"
    """It waits for something that concerns only itself; others pass freely."""


@dataclass(slots=True)
class Entry(Generic[Item]):
    """One choice in the queue. `rank` 0 is a continuation (or a sibling choice), 1 a new request."""

    item: Item
    num_tokens: int
    arrival: int
    rank: int = 1
    passed_by: int = 0
    due: float = 0.0
    """When it came, put off (or forward) by its priority."""

    @property
    def order(self) -> tuple[int, float, int]:
        return (self.rank, self.due, self.arrival)


class AdmissionQueue(Generic[Item]):
    def __init__(self, max_queued: int, reserve_skip: int) -> None:
        self._max_queued = max_queued
        self._reserve_skip = reserve_skip
        self._entries: list[Entry[Item]] = []
        self._asking: dict[int, Entry[Item]] = {}
        self._placements: deque[float] = deque(maxlen=MAX_RATE_SAMPLES)
        self._busy_since = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        """Waiting entries, without those that ask."""
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Admitted and not placed: those that ask included."""
        return len(self._entries) + len(self._asking)

    def offer(self, item: Item, num_tokens: int, time_left_s: float, now: float, priority: int = 0) -> Entry[Item]:
        """Admit; a lower `priority` goes first. Raises Overloaded, with the reason and Retry-After."""
        wait_s = self.expected_wait_s(now)
        if self.num_waiting >= self._max_queued:
            raise Overloaded(f"the queue is full ({self._max_queued} requests)", _retry_after(wait_s))
        if wait_s is not None and wait_s > time_left_s:
            raise Overloaded(
                f"the queue needs about {wait_s:.0f} s, the request has {time_left_s:.0f} s", _retry_after(wait_s)
            )
        if not self.num_waiting:
            # The rate is that of the present queue: idle time before it says nothing.
            self._placements.clear()
            self._busy_since = now
        self._arrivals += 1
        entry = Entry(item, num_tokens, self._arrivals, due=now + priority * PRIORITY_STEP_S)
        self.put_back(entry)
        return entry

    def put_back(self, entry: Entry[Item]) -> None:
        """Return an entry to its place. Never refused: it was admitted once."""
        self._asking.pop(id(entry), None)
        insort(self._entries, entry, key=lambda other: other.order)

    def remove(self, entry: Entry[Item]) -> None:
        """Idempotent."""
        if self._asking.pop(id(entry), None) is None:
            self._entries = [other for other in self._entries if other is not entry]

    def settle(self, entry: Entry[Item], now: float) -> None:
        """What it asked for was given: it is placed. Idempotent."""
        if self._asking.pop(id(entry), None) is not None:
            self._placements.append(now)

    def take(self, place: Callable[[Item], Placed], now: float) -> None:
        """Offer entries to `place`, head first, within the rule of step 2. `place` must not touch the queue."""
        blocked: list[Entry[Item]] = []
        gone: set[int] = set()
        scanned = 0
        for entry in list(self._entries):
            if blocked:
                scanned += 1
                if scanned > MAX_SCAN or any(first.passed_by >= self._reserve_skip for first in blocked):
                    break
                if any(entry.num_tokens >= first.num_tokens for first in blocked):
                    continue
            outcome = place(entry.item)
            if outcome in (Placed.PLACED, Placed.ASKED):
                gone.add(id(entry))
                if outcome is Placed.PLACED:
                    self._placements.append(now)
                else:
                    self._asking[id(entry)] = entry
                for first in blocked:
                    first.passed_by += 1
            elif outcome is Placed.BLOCKED:
                blocked.append(entry)
        if gone:
            self._entries = [entry for entry in self._entries if id(entry) not in gone]

    def expected_wait_s(self, now: float) -> float | None:
        """Time for today's queue to be placed at the recent rate; None when nothing was placed lately."""
        start = max(self._busy_since, now - RATE_WINDOW_S)
        while self._placements and self._placements[0] < start:
            self._placements.popleft()
        if len(self._placements) < 2 or not self.num_waiting:
            return None
        if len(self._placements) == MAX_RATE_SAMPLES:
            start = self._placements[0]
        return self.num_waiting * max(now - start, 0.001) / len(self._placements)


def _retry_after(wait_s: float | None) -> float:
    """Whole seconds, as the HTTP header wants them."""
    return 1.0 if wait_s is None else float(min(MAX_RETRY_AFTER_S, max(1.0, math.ceil(wait_s))))
