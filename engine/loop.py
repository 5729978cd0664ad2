"""The engine thread: takes commands, lets the role's scheduler decide, runs the step, says what came of it.

    0. once: a warm-up step, then `WarmedUp`
    1. drain the inbox; wait on it, for a bounded time, only when the last plan was empty
    2. scheduler.handle(each command), then scheduler.plan
    3. flush events: leases, refusals, prefix removals; before the step, so that nobody waits a step for them
    4. executor.launch, result
    5. scheduler.apply, or scheduler.fail when the step raised: its jobs end, the others go on
    6. flush events: tokens, ends, named pages

The thread alone touches the scheduler. It never dies silently: what ends it is in `failed`, and after that
`alive` is False and every posted command is ignored. Several failed steps in a row mean a broken device, which
no later request can use, so they end the loop too.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.messages import LoadReport
from twostroke.engine.commands import Check, Checked, Command, Event, WarmedUp
from twostroke.engine.executor import Executor
from twostroke.engine.plan import Plan
from twostroke.engine.scheduling import RoleScheduler
from twostroke.engine.warm_up import warm_up

log = structlog.get_logger(__name__)

MAX_WAIT_S = 0.5
MAX_FAILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Totals of this life, for metrics."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    """Tokens computed, prompt and output."""
    step_s: float = 0.0
    """In launch and result."""
    scheduling_s: float = 0.0
    """In plan and apply."""


class EngineLoop:
    """`on_events` is called on the engine thread, in order, and must not block; if it raises, the loop fails."""

    def __init__(
        self,
        scheduler: RoleScheduler,
        executor: Executor,
        on_events: Callable[[list[Event]], None],
        clock: Clock | None = None,
        name: str = "engine",
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._on_events = on_events
        self._clock = clock or SystemClock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Bounded by what attached streams let in (cluster.attach), and emptied whole before every step.
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._stopping = False
        self._failed: str | None = None
        self._failed_in_a_row = 0
        self._stats = LoopStats()
        self._load = (scheduler.load(self._clock.now()), self._clock.now())

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Queue a command, from any thread. Ignored once the loop has ended."""
        if self._failed is None and not self._stopping:
            self._inbox.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the step under way; idempotent. Raises TimeoutError when the step does not return."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s} s")

    def load(self) -> LoadReport:
        """The load as of the last flush, from any thread; while a step runs, its age goes on growing."""
        report, taken_s = self._load
        if report.running == 0:
            return report
        return replace(report, step_age_s=report.step_age_s + max(0.0, self._clock.now() - taken_s))

    @property
    def stats(self) -> LoopStats:
        return self._stats

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._failed is None

    @property
    def failed(self) -> str | None:
        """What ended the loop, if it was not `stop`."""
        return self._failed

    # ---------------------------------------------------------------------------------------------- thread

    def _run(self) -> None:
        try:
            warm_up(self._executor)
            self._on_events([WarmedUp()])
            # The first turn has no job yet: from it on counts the age of the last step, not from before the warm-up.
            while self._take_commands(self._turn()):
                pass
        except Exception as error:  # whatever it was, it must be seen: a thread's exception is seen by nobody
            self._failed = f"{type(error).__name__}: {error}"
            log.exception("engine_failed", error=self._failed)

    def _take_commands(self, wait_s: float) -> bool:
        """Hand all waiting commands to the scheduler; False when the loop is to end."""
        commands: list[Command | None] = []
        try:
            if wait_s > 0:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            pass
        now_s = self._clock.now()
        for command in commands:
            if command is None:
                return False
            if isinstance(command, Check):
                self._check(command, now_s)
            else:
                self._scheduler.handle(command, now_s)
        return True

    def _check(self, command: Check, now_s: float) -> None:
        fault = ""
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            fault = str(error) or "an assertion failed"
            log.error("integrity_broken", fault=fault)
        self._on_events([Checked(command.number, self._scheduler.load(now_s), fault)])

    def _turn(self) -> float:
        """One plan and, if there is anything to compute, its step; returns how long to wait for commands."""
        started_s = self._clock.now()
        plan = self._scheduler.plan(started_s)
        planned_s = self._clock.now()
        self._flush()
        if plan is None:
            deadline_s = self._scheduler.next_deadline_s()
            left_s = MAX_WAIT_S if deadline_s is None else deadline_s - self._clock.now()
            return min(MAX_WAIT_S, max(left_s, 0.001))
        applied_s = self._step(plan)
        self._flush()
        self._stats = replace(self._stats, scheduling_s=self._stats.scheduling_s + applied_s + planned_s - started_s)
        return 0.0

    def _step(self, plan: Plan) -> float:
        """Run the step and take its result in; returns the seconds spent on the latter."""
        launched_s = self._clock.now()
        stats = self._stats
        try:
            result = self._executor.launch(plan).result()
        except Exception as error:  # a device or kernel failure is an answer to the jobs of this step alone
            message = f"{type(error).__name__}: {error}"
            log.exception("step_failed", jobs=[str(job) for job in plan.jobs], error=message)
            self._stats = replace(stats, num_failed_steps=stats.num_failed_steps + 1)
            self._scheduler.fail(plan, message, self._clock.now())
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= MAX_FAILED_STEPS:
                self._flush()
                raise RuntimeError(f"{self._failed_in_a_row} steps in a row failed, the last by {message}") from error
            return 0.0
        ended_s = self._clock.now()
        self._failed_in_a_row = 0
        self._scheduler.apply(plan, result, ended_s)
        self._stats = replace(
            stats,
            num_steps=stats.num_steps + 1,
            num_tokens=stats.num_tokens + plan.num_tokens,
            step_s=stats.step_s + ended_s - launched_s,
        )
        return self._clock.now() - ended_s

    def _flush(self) -> None:
        events = self._scheduler.take_events()
        now_s = self._clock.now()
        self._load = (self._scheduler.load(now_s), now_s)
        if events:
            self._on_events(events)
