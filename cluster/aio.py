"""The only ways to start a background task and to queue between tasks.

`TaskOwner` owns tasks: every task has one, a failed task is logged and reported to its owner, and closing the
owner cancels and awaits all of them within a deadline.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import structlog

log = structlog.get_logger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TaskOwner:
    """Owns background tasks. Not thread-safe; use on one event loop.

    `on_failure(name, error)` is called once for each task that ends by an exception other than cancellation.
    """

    def __init__(self, name: str, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, Result], name: str) -> asyncio.Task[Result]:
        """Run `coroutine` until it ends or the owner closes."""
        task = asyncio.create_task(coroutine, name=f"{self._name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task_failed", task=task.get_name(), error=repr(error), exc_info=error)
            if self._on_failure is not None:
                self._on_failure(task.get_name(), error)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and wait for them. Raises TimeoutError naming those that ignore cancellation."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        await asyncio.sleep(0)  # nearly every task ends then
        tasks = [task for task in tasks if not task.done()]
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=timeout_s)
        if stuck:
            raise TimeoutError(f"tasks ignore cancellation: {sorted(task.get_name() for task in stuck)}")


async def in_thread(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """`asyncio.to_thread`, but the thread has ended when this returns or raises, also by cancellation.

    For work on memory that somebody takes back afterwards.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
    finally:
        del work  # else a failure, its traceback and this frame keep each other alive
