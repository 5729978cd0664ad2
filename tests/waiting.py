"""Waiting for a condition that has no event of its own, with a deadline; and deadlines on a busy machine."""

import asyncio
import os
from collections.abc import Callable


def on_this_machine(seconds: float) -> float:
    """What takes `seconds` at most on CPUs that nobody else wants takes longer where several ask for each."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Raises TimeoutError when `condition` does not become true in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - plain state of the code under test, which nobody signals
            await asyncio.sleep(0.002)
