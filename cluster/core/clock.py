"""Time as a value that can be replaced: monotonic seconds, never the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds. Comparable only with other readings of the same clock."""
        ...


class SystemClock:
    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that moves only when told; for tests of pure code."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_s += seconds
