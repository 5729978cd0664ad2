"""What every role's scheduler keeps beside its queues: its jobs by id, their deadlines, and its counters. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId
from twostroke.cluster.core.messages import LoadReport, RefusalReason, Refused, Submit, WorkerInfo
from twostroke.engine.commands import Command, Drain, Event, Snapshot, SnapshotTaken
from twostroke.engine.deadlines import Deadlines
from twostroke.engine.job import Job, find_fault, pages_for
from twostroke.engine.outbox import Outbox
from twostroke.engine.page_allocator import PageAllocator
from twostroke.engine.plan import Constraint

J = TypeVar("J", bound=Job)


class Roster(Generic[J]):
    """Owned by one scheduler, which alone changes it."""

    def __init__(self, info: WorkerInfo, vocab_size: int) -> None:
        self.info = info
        self.page_size = info.layout.page_size
        self.vocab_size = vocab_size
        self.allocator = PageAllocator(info.num_pages)
        self.outbox = Outbox(info.incarnation)
        self.jobs: dict[JobId, J] = {}
        self.deadlines: Deadlines[JobId] = Deadlines()
        self.draining = False
        self.ignored: Counter[str] = Counter()
        """Commands about things that are not here (any more), by kind; legal, dropped, counted."""
        self.num_steps = 0
        self.generated_tokens = 0
        self._step_mark_s = 0.0

    def add(self, job: J) -> None:
        self.jobs[job.id] = job
        self.deadlines.set(job.id, job.deadline_s)

    def remove(self, job: J) -> None:
        del self.jobs[job.id]
        self.deadlines.discard(job.id)

    def find(self, router: Incarnation, job_id: JobId) -> J | None:
        """The job, if this router has it here; else the message about it counts as ignored."""
        job = self.jobs.get(job_id)
        if job is None or job.router != router:
            self.ignored["unknown_job"] += 1
            return None
        return job

    def of_router(self, router: Incarnation) -> list[J]:
        return [job for job in self.jobs.values() if job.router == router]

    def refuse(self, router: Incarnation, submit: Submit, reason: RefusalReason, message: str) -> None:
        self.outbox.tell(router, Refused(submit.job, reason, message))

    def find_refusal(self, submit: Submit, constraint: Constraint | None) -> tuple[RefusalReason, str] | None:
        """Why no role would take this now, or None."""
        if submit.job in self.jobs:
            return RefusalReason.BAD_SUBMIT, f"job {submit.job} is here already"
        if self.draining:
            return RefusalReason.DRAINING, "this worker drains"
        if submit.sampling.grammar is not None and constraint is None:
            return RefusalReason.BAD_SUBMIT, "its grammar could not be compiled here"
        fault = find_fault(submit, self.vocab_size)
        return None if fault is None else (RefusalReason.BAD_SUBMIT, fault)

    def find_too_large(self, num_tokens: int) -> tuple[RefusalReason, str] | None:
        """Why a job that comes to `num_tokens` could never fit, or None."""
        num_pages = pages_for(num_tokens, self.page_size)
        if num_tokens <= self.info.max_context and num_pages <= self.info.num_pages:
            return None
        return RefusalReason.TOO_LARGE, (
            f"{num_tokens} tokens in {num_pages} pages; this worker takes {self.info.max_context} tokens "
            f"and has {self.info.num_pages} pages"
        )

    def handle(self, command: Command) -> None:
        """What every role does with a command that is not the role's own."""
        match command:
            case Drain():
                self.draining = True
            case Snapshot(number):
                self.outbox.event(SnapshotTaken(number, self.snapshot()))
            case _:
                self.ignored[type(command).__name__] += 1

    def step_idle(self, now_s: float) -> None:
        """There was nothing to compute: the age of the last step starts anew."""
        self._step_mark_s = now_s

    def step_ended(self, now_s: float) -> None:
        self.num_steps += 1
        self._step_mark_s = now_s

    def take_events(self) -> list[Event]:
        return self.outbox.take(self.allocator)

    def snapshot(self) -> PrefixSnapshot:
        return self.outbox.snapshot(self.allocator)

    def load(self, now_s: float, *, running: int, waiting: int, leases: int, uncomputed: Iterable[Job]) -> LoadReport:
        return LoadReport(
            ledger=self.allocator.ledger(),
            running=running,
            waiting=waiting,
            leases=leases,
            queued_tokens=sum(len(job.tokens) - job.num_computed for job in uncomputed),
            step_age_s=max(0.0, now_s - self._step_mark_s) if running else 0.0,
            num_steps=self.num_steps,
            event_sequence=self.outbox.event_sequence,
            draining=self.draining,
            generated_tokens=self.generated_tokens,
        )
