"""When to try again, and how long to wait before: pure.

What may be tried again says the error (`retryable`); how long to wait at least, its `retry_after_s` where the server
named a time (Retry-After, RetryInfo). On top comes jitter below an exponential bound, so that clients that were
refused together do not come back together.
"""

from dataclasses import dataclass
from random import Random

from twostroke.cluster.core.errors import Overloaded, TwostrokeError, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 4
    """1: never again."""
    base_s: float = 0.25
    """Bound of the jitter after the first attempt; it doubles with each."""
    max_s: float = 8.0

    def delay_s(self, attempt: int, error: TwostrokeError, time_left_s: float, random: Random) -> float | None:
        """Seconds until the next attempt after `attempt` (from 1) failed; None: give up.

        Gives up at once when the wait would outlast the deadline.
        """
        if attempt >= self.max_attempts or not error.retryable:
            return None
        asked = error.retry_after_s if isinstance(error, Overloaded | Unavailable) else 0.0
        delay = asked + random.uniform(0.0, min(self.max_s, self.base_s * 2.0 ** (attempt - 1)))
        return delay if delay < time_left_s else None


NEVER = RetryPolicy(max_attempts=1)
