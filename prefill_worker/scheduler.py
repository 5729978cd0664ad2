"""What a prefill worker computes next, and what it says about it. Pure: no I/O, clock or randomness.

    1. Submit      refused with a reason, or WAITING in a bounded FIFO
    2. admitted    when pages for the whole prompt are there: RUNNING, so that it never runs out of them. Its own
                   cached prefix comes first; pages of it that the lease lacks are announced at once
    3. each step   jobs in order of admission share the token budget; every chunk announces the pages it filled
    4. first token told to the router. The end of the answer: FINISHED, the shipment is dropped. Otherwise the last,
                   partly filled page and `PrefillDone` are announced: SHIPPING, for `hold_s` from then, or from the
                   last page that the other side took
    5. ShipmentEnded   HANDED_OVER or TRANSFER_FAILED, and the pages are given back

Cancel, a lost router, expiry and failed steps end a job in any phase, once. If its pages were announced, the
shipping task may be reading them: it is told to stop (`ShipmentDropped`) and the job stays, DROPPED, only to
hold the pages until `ShipmentEnded`.
"""

from collections import deque
from dataclasses import dataclass

from twostroke.cluster.core.errors import LayoutMismatch
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId, PageId
from twostroke.cluster.core.layout import check_compatible
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    JobTimings,
    LoadReport,
    Outcome,
    RefusalReason,
    Started,
    Stroke,
    Submit,
    TokenRun,
    WorkerInfo,
)
from twostroke.cluster.core.sampling import FinishReason
from twostroke.engine.commands import (
    Command,
    Event,
    FromRouter,
    PagesReady,
    PrefillDone,
    RouterGone,
    ShipmentDropped,
    ShipmentEnded,
    ShipmentTouched,
)
from twostroke.engine.job import (
    Job,
    JobPhase,
    PlanBuilder,
    hit_keys,
    name_filled_pages,
    pages_for,
    release_pages,
    take_pages,
    take_scores,
)
from twostroke.engine.plan import Constraint, Plan, StepResult
from twostroke.engine.roster import Roster


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """`config.PrefillSection`, as far as scheduling goes. The token budget of a step is `info.chunk_tokens`."""

    max_waiting: int = 64
    hold_s: float = 30.0


@dataclass(slots=True, eq=False)
class PrefillJob(Job):
    num_announced: int = 0
    """Leading pages that were announced or are held by the lease."""
    shipment_open: bool = False
    """The shipping task may read the job's pages; it will answer with one ShipmentEnded."""


class PrefillScheduler:
    """Implements `engine.scheduling.RoleScheduler`; used by the engine thread alone."""

    def __init__(self, info: WorkerInfo, vocab_size: int, limits: PrefillLimits) -> None:
        self._roster: Roster[PrefillJob] = Roster(info, vocab_size)
        self._info = info
        self._limits = limits
        self._allocator = self._roster.allocator
        self._outbox = self._roster.outbox
        self._waiting: deque[PrefillJob] = deque()
        self._running: list[PrefillJob] = []

    # ---------------------------------------------------------------------------------------------- commands

    def handle(self, command: Command, now_s: float) -> None:
        match command:
            case FromRouter(router, Submit() as submit, constraint):
                self._submit(router, submit, constraint, now_s)
            case FromRouter(router, Cancel(job_id)):
                job = self._roster.find(router, job_id)
                if job is not None and job.phase is not JobPhase.DROPPED:
                    self._end(job, Outcome.CANCELLED, now_s)
            case RouterGone(router):
                for job in self._roster.of_router(router):
                    if job.phase is not JobPhase.DROPPED:
                        self._end(job, Outcome.CANCELLED, now_s, message="its router is gone")
                self._outbox.forget(router)
            case ShipmentTouched(job_id):
                self._shipment_touched(job_id, now_s)
            case ShipmentEnded():
                self._shipment_ended(command, now_s)
            case _:
                self._roster.handle(command)

    def _submit(self, router: Incarnation, submit: Submit, constraint: Constraint | None, now_s: float) -> None:
        refusal = self._find_refusal(submit, constraint)
        if refusal is not None:
            self._roster.refuse(router, submit, *refusal)
            return
        job = PrefillJob.of(submit, router, self._info.layout, JobPhase.WAITING, now_s, constraint)
        job.num_announced = submit.lease.num_held if submit.lease else 0
        self._roster.add(job)
        self._waiting.append(job)

    def _find_refusal(self, submit: Submit, constraint: Constraint | None) -> tuple[RefusalReason, str] | None:
        if submit.stroke is not Stroke.PREFILL:
            return RefusalReason.WRONG_ROLE, f"a prefill worker does not {submit.stroke.value}"
        older = self._roster.jobs.get(submit.job)
        if older is not None and older.phase is JobPhase.DROPPED:
            # The same attempt under a renewed lease, back here before the last shipment let go of its pages.
            return RefusalReason.QUEUE_FULL, f"the last shipment of {submit.job} is still ending"
        refusal = self._roster.find_refusal(submit, constraint)
        if refusal is not None:
            return refusal
        num_tokens = len(submit.prompt) + len(submit.delivered)
        refusal = self._roster.find_too_large(num_tokens)
        if refusal is not None:
            return refusal
        if submit.lease is None:
            if submit.sampling.max_tokens > len(submit.delivered) + 1:
                return RefusalReason.BAD_SUBMIT, "more than one token is to go, and there is no lease"
        else:
            try:
                check_compatible(self._info.layout, submit.lease.layout)
            except LayoutMismatch as error:
                return RefusalReason.LAYOUT, error.message
            num_pages = pages_for(num_tokens, self._roster.page_size)
            if submit.lease.num_pages != num_pages:
                return RefusalReason.BAD_SUBMIT, f"a lease of {submit.lease.num_pages} pages for {num_pages}"
        if len(self._waiting) >= self._limits.max_waiting:
            return RefusalReason.QUEUE_FULL, f"{len(self._waiting)} jobs wait here"
        return None

    def _shipment_touched(self, job_id: JobId, now_s: float) -> None:
        job = self._roster.jobs.get(job_id)
        if job is None or job.phase is JobPhase.DROPPED:
            self._roster.ignored["ShipmentTouched"] += 1
        elif job.phase is JobPhase.SHIPPING:
            self._hold(job, now_s)

    def _hold(self, job: PrefillJob, now_s: float) -> None:
        self._roster.deadlines.set(job.id, min(job.deadline_s, now_s + self._limits.hold_s))

    def _shipment_ended(self, command: ShipmentEnded, now_s: float) -> None:
        job = self._roster.jobs.get(command.job)
        if job is None or not job.shipment_open:
            self._roster.ignored["ShipmentEnded"] += 1
            return
        job.shipment_open = False
        if job.phase is JobPhase.DROPPED:
            self._forget(job)
        elif command.error or job.phase is not JobPhase.SHIPPING:
            message = command.error or "the shipment ended before the prefill did"
            self._end(job, Outcome.TRANSFER_FAILED, now_s, message=message, shipment=command)
        else:
            self._end(job, Outcome.HANDED_OVER, now_s, shipment=command)

    # ----------------------------------------------------------------------------------------------- steps

    def plan(self, now_s: float) -> Plan | None:
        for job_id in self._roster.deadlines.pop_expired(now_s):
            self._expire(self._roster.jobs[job_id], now_s)
        builder = PlanBuilder(self._roster.page_size)
        budget = self._info.chunk_tokens
        for job in self._running:
            if budget == 0:
                break
            budget -= builder.add_chunk(job, budget)
        while budget > 0 and self._waiting and self._admit(self._waiting[0], now_s):
            budget -= builder.add_chunk(self._waiting.popleft(), budget)
        plan = builder.build()
        if plan is None:
            self._roster.step_idle(now_s)
        return plan

    def _admit(self, job: PrefillJob, now_s: float) -> bool:
        """Give it pages for its whole prompt; False, and nothing changed, when they are not there now."""
        held = self._allocator.lookup(hit_keys(job, self._roster.page_size))
        num_new = pages_for(len(job.tokens), self._roster.page_size) - len(held)
        if num_new > self._allocator.num_available - self._allocator.count_cached(held):
            return False
        take_pages(job, held, num_new, self._allocator, self._roster.page_size)
        job.cached_tokens = job.num_computed
        job.admitted_s = now_s
        job.advance(JobPhase.RUNNING)
        self._running.append(job)
        # At once: the end of the transfer, which has all figures, may be told after that of the answer, or never.
        self._outbox.tell(job.router, Started(job.id, job.cached_tokens))
        self._announce(job, len(held))
        return True

    def apply(self, plan: Plan, result: StepResult, now_s: float) -> None:
        self._roster.step_ended(now_s)
        late = {plan.jobs[row] for row in result.late}
        for job_id, num_new, token in zip(plan.jobs, plan.num_new, result.tokens, strict=True):
            job = self._roster.jobs.get(job_id)
            if job is None or job.phase is not JobPhase.RUNNING or job_id in late:
                continue
            if job_id in result.scores:
                self._outbox.tell(job.router, take_scores(job, result.scores[job_id]))
            job.num_computed += num_new
            job.computed_tokens += num_new
            name_filled_pages(job, self._allocator, self._roster.page_size)
            if token is None:
                self._announce(job, job.num_computed // self._roster.page_size)
            else:
                self._take_first_token(job, token, result.logprobs.get(job_id), now_s)
        for row, reason in result.broken.items():
            job = self._roster.jobs.get(plan.jobs[row])
            if job is not None and job.phase is JobPhase.RUNNING:
                self._end(job, Outcome.BROKEN_GRAMMAR, now_s, message=reason)

    def _take_first_token(self, job: PrefillJob, token: int, logprob: TokenLogprob | None, now_s: float) -> None:
        job.first_token_s = now_s
        sampling, lease = job.submit.sampling, job.submit.lease
        if len(job.output) >= sampling.max_tokens:
            self._end(job, Outcome.FINISHED, now_s, finish_reason=FinishReason.LENGTH)
            return
        self._roster.generated_tokens += 1
        logprobs = () if logprob is None else (logprob,)
        self._outbox.tokens(job.router, TokenRun(job.id, len(job.output), (token,), logprobs))
        job.output.append(token)
        finish_reason = sampling.finish_after(len(job.output), token)
        if finish_reason is not None:
            self._end(job, Outcome.FINISHED, now_s, finish_reason=finish_reason)
            return
        assert lease is not None, "a job without a lease had more than one token to go"
        self._announce(job, len(job.pages))
        self._outbox.event(PrefillDone(job.id, lease, token, len(job.output) - 1, logprob))
        job.shipment_open = True
        job.advance(JobPhase.SHIPPING)
        self._running.remove(job)
        self._hold(job, now_s)

    def _announce(self, job: PrefillJob, num_pages: int) -> None:
        """Offer the leading `num_pages` pages, as far as the lease lacks them and they were not offered before."""
        lease = job.submit.lease
        if lease is None or num_pages <= job.num_announced:
            return
        pages = tuple(job.pages[job.num_announced : num_pages])
        self._outbox.event(PagesReady(job.id, lease, job.num_announced - lease.num_held, pages))
        job.num_announced = num_pages
        job.shipment_open = True

    def fail(self, plan: Plan, message: str, now_s: float) -> None:
        self._roster.step_ended(now_s)
        for job_id in plan.jobs:
            job = self._roster.jobs.get(job_id)
            if job is not None and job.phase is JobPhase.RUNNING:
                self._end(job, Outcome.FAILED, now_s, message=message)

    # ------------------------------------------------------------------------------------------------ ends

    def _expire(self, job: PrefillJob, now_s: float) -> None:
        if now_s >= job.deadline_s:
            self._end(job, Outcome.EXPIRED, now_s, message="its time was up")
        else:
            message = f"the transfer did not get on for {self._limits.hold_s:g} s"
            self._end(job, Outcome.TRANSFER_FAILED, now_s, message=message)

    def _end(
        self,
        job: PrefillJob,
        outcome: Outcome,
        now_s: float,
        *,
        finish_reason: FinishReason | None = None,
        message: str = "",
        shipment: ShipmentEnded | None = None,
    ) -> None:
        """The one end of a job, from any phase but DROPPED."""
        if job.phase is JobPhase.WAITING:
            self._waiting.remove(job)
        elif job.phase is JobPhase.RUNNING:
            self._running.remove(job)
        timings = _timings(job, now_s, shipment)
        self._outbox.ended(job.router, Ended(job.id, outcome, finish_reason, len(job.output), message, timings))
        if job.shipment_open:
            self._roster.deadlines.discard(job.id)
            job.advance(JobPhase.DROPPED)
            self._outbox.event(ShipmentDropped(job.id, message or outcome.value))
        else:
            self._forget(job)

    def _forget(self, job: PrefillJob) -> None:
        release_pages(job, self._allocator)
        self._roster.remove(job)

    # --------------------------------------------------------------------------------------------- reading

    def take_events(self) -> list[Event]:
        return self._roster.take_events()

    def load(self, now_s: float) -> LoadReport:
        return self._roster.load(
            now_s,
            running=len(self._running),
            waiting=len(self._waiting),
            leases=0,
            uncomputed=[*self._running, *self._waiting],
        )

    def snapshot(self) -> PrefixSnapshot:
        return self._roster.snapshot()

    def next_deadline_s(self) -> float | None:
        return self._roster.deadlines.next_s()

    @property
    def idle(self) -> bool:
        return not self._roster.jobs

    @property
    def ignored(self) -> dict[str, int]:
        """How many commands were about something that is not here (any more), by kind."""
        return dict(self._roster.ignored)

    def free_pages(self) -> tuple[PageId, ...]:
        """Pages that nobody may read or write now; for tests, which poison them."""
        return self._allocator.free_pages()

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
        phases = {phase: 0 for phase in JobPhase}
        held: dict[int, int] = {}
        for job in self._roster.jobs.values():
            phases[job.phase] += 1
            assert (job.phase is JobPhase.WAITING) == (not job.pages), f"{job.phase} job {job.id} and its pages"
            assert job.phase is not JobPhase.DROPPED or job.shipment_open, f"job {job.id} waits for no shipment"
            for page in job.pages:
                held[page] = held.get(page, 0) + 1
        assert phases[JobPhase.WAITING] == len(self._waiting), "waiting jobs and queue differ"
        assert phases[JobPhase.RUNNING] == len(self._running), "running jobs and list differ"
        self._allocator.check_references(held)
        ledger = self._allocator.ledger()
        assert ledger.leased == ledger.quarantined == 0, "a prefill worker leases no pages"


def _timings(job: PrefillJob, now_s: float, shipment: ShipmentEnded | None) -> JobTimings:
    admitted_s = now_s if job.admitted_s is None else job.admitted_s
    first_token_s = now_s if job.first_token_s is None else job.first_token_s
    return JobTimings(
        queue_s=admitted_s - job.submitted_s,
        prefill_s=first_token_s - admitted_s,
        transfer_busy_s=shipment.busy_s if shipment else 0.0,
        transfer_exposed_s=now_s - first_token_s if shipment else 0.0,
        cached_tokens=job.cached_tokens,
        computed_tokens=job.computed_tokens,
        pages_shipped=shipment.pages if shipment else 0,
        bytes_shipped=shipment.bytes if shipment else 0,
        transport=shipment.transport if shipment else "",
    )
