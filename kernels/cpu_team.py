"""Threads that compute one step together, from its first operation to its last, without meeting Python in between.

A kernel is a sequence of operations, each cut into items. Every thread runs the whole kernel: it claims items of an
operation until none is left, waits until all are finished, and goes to the next. Nobody is counted: a thread that
wakes late, or is put aside while another process computes, holds up no one unless it has a claim.

Waking a sleeping thread takes 0.05 to 0.5 ms on a virtual machine and a step has hundreds of operations (measured:
docs/adr/0006-cpu-decoder.md). So threads wake once a step and spin between operations.

Two workers of one machine may each have as many threads as it has CPUs: a lone request is then as fast as the machine.
When both are busy, threads that spin for others that wait for a CPU waste it, and each is better off alone. `Pace` sees
that and sends the helpers away for a while.
"""

import threading
import time
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


class Pace:
    """Whether helpers are worth waking. The calling thread of a step that lost its CPU for a good part of the time had
    to share it; then no helper is woken for `shortest_s`, up to `longest_s`: twice as long each time that it turns out
    the same again, half as long when it does not.
    """

    def __init__(
        self, window_s: float = 0.1, share: float = 0.2, shortest_s: float = 1.0, longest_s: float = 16.0
    ) -> None:
        self._window_s, self._share, self._shortest_s, self._longest_s = window_s, share, shortest_s, longest_s
        self._alone_until_s, self._hold_s = 0.0, shortest_s
        self._wall_s = self._cpu_s = 0.0

    def alone(self, now_s: float) -> bool:
        return now_s < self._alone_until_s

    def record(self, now_s: float, wall_s: float, cpu_s: float) -> None:
        """A step with helpers that took `wall_s`, of which its first thread had a CPU for `cpu_s`."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < self._window_s:
            return
        if self._wall_s - self._cpu_s > self._share * self._wall_s:
            self._alone_until_s = now_s + self._hold_s
            self._hold_s = min(2 * self._hold_s, self._longest_s)
        else:
            self._hold_s = max(self._hold_s / 2, self._shortest_s)
        self._wall_s = self._cpu_s = 0.0


class Team:
    """The calling thread of `run` and up to `threads - 1` helpers, which sleep between runs and end with the team."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pace = Pace()
        self._inboxes: list[SimpleQueue[_Task | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, inbox in enumerate(self._inboxes):
            threading.Thread(target=_help, args=(inbox,), name=f"kernels-{number + 1}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, kernel: Callable[..., None], arguments: tuple[Any, ...], num_operations: int) -> None:
        """`kernel(*arguments, counters)`, on all threads. Returns when every operation is finished.

        `kernel` allocates all it needs before its first claim, so that a helper that fails there leaves no claim.
        """
        counters = np.zeros(num_operations * 2 * _LINE, dtype=np.int64)
        started_s = time.monotonic()
        if not self._inboxes or self._pace.alone(started_s):
            kernel(*arguments, counters)
            return
        for inbox in self._inboxes:
            if inbox.empty():  # else it is late by a whole step
                inbox.put((kernel, (*arguments, counters)))
        cpu_s = time.thread_time()
        kernel(*arguments, counters)
        ended_s = time.monotonic()
        self._pace.record(ended_s, ended_s - started_s, time.thread_time() - cpu_s)


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
