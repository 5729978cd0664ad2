"""The router's queue: admitted and not yet placed. Pure; time is passed in as monotonic seconds.

Life of an entry:
  1. `offer` takes a new request, or refuses it: the queue is full, or the wait that recent placements predict for its
     place is longer than the time it has left. Both carry a Retry-After of that wait. Its place is by arrival and
     priority: a step of priority is worth `PRIORITY_STEP_S` of waiting, so that what is put off still has its turn.
  2. `take` walks from the head and asks `place` for each entry; a placed entry leaves. An entry that is blocked keeps
     its position; later ones may pass it only if they are smaller, and at most `reserve_skip` of them in all, so
     that a large request cannot starve.
  3. `put_back` returns an entry to where its arrival places it: refused for lack of pages, or a continuation, which
     stands before all new requests.
  4. `remove`: cancelled or out of time.
An entry that asks a worker for pages (`Placed.ASKED`) is out of the walk, but counts as waiting until `settle` says
that it got them, or `put_back` or `remove` ends the asking: else a full queue looks free each time one asks in vain.

The prediction refuses people, so it says nothing until it has seen enough, and errs on the short side:

    steps    placements within STEP_S of each other are one step; only while more wait than may pass a blocked one: of
             fewer it may be that nobody came who could. Those at the beginning fill empty workers and are no pace
    pace     seconds a placement over the last MAX_STEPS steps, without the quarter of them that took longest: a stall
             (a first step that compiles, a machine that is busy) costs its time once, not once for each that waits
    wait     time since the last step, if so many still wait, + entries that stand before it * pace
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from twostroke.cluster.core.errors import Overloaded

STEP_S = 0.1
MIN_STEPS = 8
MAX_STEPS = 32
MAX_WAIT_S = 3600.0
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


class Forecast(NamedTuple):
    """Of the wait of a request that comes now."""

    wait_s: float
    """At most MAX_WAIT_S."""
    num_ahead: int
    pace_s: float
    """Seconds a placement."""


class AdmissionQueue(Generic[Item]):
    def __init__(self, max_queued: int, reserve_skip: int) -> None:
        self._max_queued = max_queued
        self._reserve_skip = reserve_skip
        self._entries: list[Entry[Item]] = []
        self._asking: dict[int, Entry[Item]] = {}
        self._steps: deque[tuple[float, int]] = deque(maxlen=1 + MAX_STEPS)
        """When, and how many were placed; the first only says when the next began."""
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
        due = now + priority * PRIORITY_STEP_S
        forecast = self.forecast(due, now)
        retry_after_s = _retry_after(forecast)
        if self.num_waiting >= self._max_queued:
            raise Overloaded(f"the queue is full ({self._max_queued} requests)", retry_after_s)
        if forecast is not None and forecast.wait_s > time_left_s:
            raise Overloaded(
                f"the queue needs about {forecast.wait_s:.0f} s ({forecast.num_ahead} stand before it, one is placed "
                f"each {forecast.pace_s:.2g} s), the request has {time_left_s:.0f} s",
                retry_after_s,
            )
        if self.num_waiting <= self._reserve_skip:
            self._steps.clear()
            self._steps.append((now, 0))
        self._arrivals += 1
        entry = Entry(item, num_tokens, self._arrivals, due=due)
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
            self._note_placed(now)

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
                    self._note_placed(now)
                else:
                    self._asking[id(entry)] = entry
                for first in blocked:
                    first.passed_by += 1
            elif outcome is Placed.BLOCKED:
                blocked.append(entry)
        if gone:
            self._entries = [entry for entry in self._entries if id(entry) not in gone]

    def _note_placed(self, now: float) -> None:
        began, num_placed = self._steps[-1]
        if now - began < STEP_S:
            self._steps[-1] = (began, num_placed + 1)
        else:
            self._steps.append((now, 1))

    def forecast(self, due: float, now: float) -> Forecast | None:
        """The wait of a new request that is due then; None while nothing is known of the pace."""
        if not self.num_waiting or len(self._steps) <= MIN_STEPS:
            return None
        taken = sorted((time - before, placed) for (before, _), (time, placed) in pairwise(self._steps))
        usual = taken[: -(-3 * len(taken) // 4)]
        pace_s = sum(seconds for seconds, _ in usual) / sum(placed for _, placed in usual)
        num_ahead = len(self._asking) + bisect_right(self._entries, (1, due), key=lambda entry: entry.order[:2])
        stalled_s = now - self._steps[-1][0] if num_ahead > self._reserve_skip else 0.0
        return Forecast(min(MAX_WAIT_S, stalled_s + num_ahead * pace_s), num_ahead, pace_s)


def _retry_after(forecast: Forecast | None) -> float:
    """Whole seconds, as the HTTP header wants them."""
    return 1.0 if forecast is None else float(min(MAX_RETRY_AFTER_S, max(1.0, math.ceil(forecast.wait_s))))
