"""Threads that compute one step together, from its first operation to its last, without meeting Python in between.

A kernel is a sequence of operations, each cut into items. Every thread runs the whole kernel: it claims items of an
operation until none is left, waits until all are finished, and goes to the next. Nobody is counted: a thread that
wakes late, or is put aside while another process computes, holds up no one unless it has a claim.

Waking a sleeping thread takes 0.05 to 0.5 ms on a virtual machine and a step has hundreds of operations (measured:
docs/adr/0006-cpu-decoder.md). So threads wake once a step and spin between operations.
"""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from twostroke.kernels.cpu_intrinsics import atomic_add, atomic_load, yield_cpu
from twostroke.kernels.cpu_ops import compiled

_LINE = 8
"""int64 in a cache line: claims and finished items of an operation lie in two."""
_SPINS = 256

_Task = tuple[Callable[..., None], tuple[Any, ...]]


class Team:
    """The calling thread of `run` and `threads - 1` helpers, which sleep between runs and end with the team."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._inboxes: list[SimpleQueue[_Task | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, inbox in enumerate(self._inboxes):
            threading.Thread(target=_help, args=(inbox,), name=f"kernels-{number + 1}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, kernel: Callable[..., None], arguments: tuple[Any, ...], num_operations: int) -> None:
        """`kernel(*arguments, counters)`, on all threads. Returns when every operation is finished.

        `kernel` allocates all it needs before its first claim, so that a helper that fails there leaves no claim.
        """
        counters = np.zeros(num_operations * 2 * _LINE, dtype=np.int64)
        for inbox in self._inboxes:
            if inbox.empty():  # else it is late by a whole step
                inbox.put((kernel, (*arguments, counters)))
        kernel(*arguments, counters)


def _help(inbox: "SimpleQueue[_Task | None]") -> None:
    while (task := inbox.get()) is not None:
        kernel, arguments = task
        kernel(*arguments)
        del task, kernel, arguments


def _dismiss(inboxes: "list[SimpleQueue[_Task | None]]") -> None:
    for inbox in inboxes:
        inbox.put(None)


@compiled
def claim(counters: Any, operation: int, size: int) -> int:
    """The first of `size` items that are now the caller's; past the operation's last: none is left."""
    begin: int = atomic_add(counters, operation * 2 * _LINE, size)
    return begin


@compiled
def finish(counters: Any, operation: int, size: int) -> None:
    atomic_add(counters, operation * 2 * _LINE + _LINE, size)


@compiled
def wait(counters: Any, operation: int, items: int) -> None:
    """Until all items are finished, by whomever; what they wrote can then be read."""
    spins = 0
    while atomic_load(counters, operation * 2 * _LINE + _LINE) < items:
        spins += 1
        if spins % _SPINS == 0:
            yield_cpu()
