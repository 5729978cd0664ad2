"""Waiting for a condition that has no event of its own, with a deadline."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Raises TimeoutError when `condition` does not become true in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - plain state of the code under test, which nobody signals
            await asyncio.sleep(0.002)
