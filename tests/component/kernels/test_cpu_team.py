"""A team finishes every item once, whoever comes late; and its helpers end with it."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from twostroke.kernels.cpu_ops import compiled
from twostroke.kernels.cpu_team import Team, claim, finish, wait

OPERATIONS, ITEMS = 50, 97


@compiled
def _prefix_sums(values: Any, counters: Any) -> None:
    """Row by row, each from the row before: wrong if any thread ran ahead of a row that was not finished."""
    for row in range(1, values.shape[0]):
        while True:
            begin = claim(counters, row - 1, 3)
            if begin >= values.shape[1]:
                break
            end = min(begin + 3, values.shape[1])
            for item in range(begin, end):
                values[row, item] += values[row - 1, values.shape[1] - 1 - item] + 1
            finish(counters, row - 1, end - begin)
        wait(counters, row - 1, values.shape[1])


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param)


def test_each_item_is_done_once_and_operations_in_order(team: Team) -> None:
    for _ in range(40):
        values = np.zeros((OPERATIONS + 1, ITEMS), dtype=np.int64)
        team.run(_prefix_sums, (values,), OPERATIONS)
        assert (values == np.arange(OPERATIONS + 1)[:, None]).all()


def test_helpers_end_with_their_team() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    team.run(_prefix_sums, (np.zeros((3, ITEMS), dtype=np.int64),), 2)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    gc.collect()
    for helper in helpers:
        helper.join(5)
        assert not helper.is_alive()
