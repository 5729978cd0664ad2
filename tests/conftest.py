"""Session-wide set-up."""

import asyncio
import gc
from collections.abc import Iterator

import pytest
import structlog


def pytest_sessionstart() -> None:
    """Without this, pytest-asyncio makes a loop for a synchronous test that precedes the first asynchronous one,
    replaces it, and its ResourceWarning fails the session at its end.
    """
    asyncio.set_event_loop(None)


def pytest_collection_finish() -> None:
    """All modules are imported now: a full collection over them takes a second, in which this process answers nobody,
    and three seconds of silence end a link to a worker.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """A test that runs the command line sets a level, which would hide what a later test reads from the log."""
    yield
    structlog.reset_defaults()
