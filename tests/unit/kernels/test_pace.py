"""When helpers of a step are worth waking."""

import pytest

numba = pytest.importorskip("numba")

from twostroke.kernels.cpu_team import Pace  # noqa: E402


def test_a_thread_that_keeps_its_cpu_always_has_helpers() -> None:
    pace = Pace()
    for step in range(100):
        pace.record(step * 0.05, wall_s=0.05, cpu_s=0.045)
        assert not pace.alone(step * 0.05)


def test_a_lost_cpu_sends_the_helpers_away_for_longer_each_time_up_to_a_limit() -> None:
    pace, now_s, holds = Pace(shortest_s=1.0, longest_s=4.0), 0.0, []
    for _ in range(4):
        pace.record(now_s, wall_s=0.2, cpu_s=0.1)
        begin_s = now_s
        while pace.alone(now_s):
            now_s += 0.25
        holds.append(now_s - begin_s)
    assert holds == [1.0, 2.0, 4.0, 4.0]


def test_one_short_step_decides_nothing_and_a_quiet_time_shortens_the_next_absence() -> None:
    pace = Pace(window_s=0.1, shortest_s=1.0)
    pace.record(0.0, wall_s=0.02, cpu_s=0.001)
    assert not pace.alone(0.0)
    for now_s in (0.0, 10.0):  # absences of one and of two seconds
        pace.record(now_s, wall_s=0.2, cpu_s=0.1)
    assert pace.alone(11.9)
    pace.record(20.0, wall_s=0.2, cpu_s=0.2)  # the next would have taken four
    pace.record(20.0, wall_s=0.2, cpu_s=0.1)
    assert pace.alone(21.9)
    assert not pace.alone(22.0)
