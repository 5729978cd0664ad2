"""Session-wide set-up."""

import asyncio


def pytest_sessionstart() -> None:
    """Without this, pytest-asyncio makes a loop for a synchronous test that precedes the first asynchronous one,
    replaces it, and its ResourceWarning fails the session at its end.
    """
    asyncio.set_event_loop(None)
