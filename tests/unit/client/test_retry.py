"""When a client tries again, and how long it waits."""

from random import Random

import pytest

from twostroke.client.retry import NEVER, RetryPolicy
from twostroke.cluster.core.errors import InvalidRequest, Overloaded, PeerLost, TwostrokeError, Unavailable

POLICY = RetryPolicy(max_attempts=5, base_s=1.0, max_s=4.0)


@pytest.mark.parametrize(("attempt", "bound"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0)])
def test_jitter_doubles_up_to_its_bound_over_what_the_server_asks(attempt: int, bound: float) -> None:
    random = Random(1)
    for error, asked in ((PeerLost("x"), 0.0), (Overloaded("x", 2.0), 2.0), (Unavailable("x", 3.0), 3.0)):
        delays = [POLICY.delay_s(attempt, error, 100.0, random) for _ in range(200)]
        found = [delay for delay in delays if delay is not None]
        assert len(found) == len(delays)
        assert asked <= min(found) < asked + 0.1 * bound
        assert asked + 0.9 * bound < max(found) <= asked + bound


@pytest.mark.parametrize(
    ("policy", "attempt", "error", "left_s"),
    [
        pytest.param(POLICY, 5, PeerLost("x"), 100.0, id="the last attempt"),
        pytest.param(POLICY, 1, InvalidRequest("x", "n"), 100.0, id="not retryable"),
        pytest.param(POLICY, 1, Overloaded("x", 10.0), 10.0, id="no time"),
        pytest.param(NEVER, 1, PeerLost("x"), 100.0, id="never"),
    ],
)
def test_it_gives_up(policy: RetryPolicy, attempt: int, error: TwostrokeError, left_s: float) -> None:
    assert policy.delay_s(attempt, error, left_s, Random(1)) is None
