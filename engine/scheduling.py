"""What the engine thread needs from a role: a pure scheduler.

Implementations: `prefill_worker.scheduler.PrefillScheduler`, `decode_worker.scheduler.DecodeScheduler`. They do
no I/O and read no clock (`now_s` is passed in); they own the allocator, jobs and leases, and are used by the
engine thread alone.
"""

from typing import Protocol

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.messages import LoadReport
from twostroke.engine.commands import Command, Event
from twostroke.engine.plan import Plan, StepResult


class RoleScheduler(Protocol):
    def handle(self, command: Command, now_s: float) -> None:
        """Take a command into the state. Never raises for input; refusals and ends become events."""
        ...

    def plan(self, now_s: float) -> Plan | None:
        """Expire what ran out of time, then decide the next step; None when there is nothing to compute."""
        ...

    def apply(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Take the step's tokens into the state. Called once for each plan, in order."""
        ...

    def fail(self, plan: Plan, message: str, now_s: float) -> None:
        """The step failed: every job of the plan ends as FAILED, nothing else changes."""
        ...

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        ...

    def load(self, now_s: float) -> LoadReport:
        """Current load. Does not change the state."""
        ...

    def snapshot(self) -> PrefixSnapshot: ...

    def next_deadline_s(self) -> float | None:
        """When `plan` must be called again even if no command comes; None when nothing can expire."""
        ...

    @property
    def idle(self) -> bool:
        """True when it holds no job and no lease."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError with what is wrong when pages, jobs and leases do not add up."""
        ...
