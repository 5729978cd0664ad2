"""What a decode worker computes next, and what it promises to whom. Pure: no I/O, clock or randomness.

    RESERVE   1. lease    references on the leading pages that are cached here, and fresh pages for the rest of
                          prompt + delivered + 1 token; granted only if afterwards every running job and lease could
                          take one page more. It never preempts, and nothing else ever takes its pages
              2. LEASED   lives `lease_ttl_s` from the last renewal or accepted chunk
              3. commit   verified by the lease book: the pages are the job's and get names; READY
    LOCAL     WAITING until pages for all of its tokens are there; its prompt is then computed here in chunks
    both      4. RUNNING  each step computes one token of every job that decodes, then chunks of prompts, under
                          one token budget; ends by the sampling parameters, time, cancel, or a lost router

Out of pages, the latest-admitted job is preempted, never the only one. Its full pages stay named; it WAITs and
resumes here if little is uncached and it was not preempted too often, else it ends PREEMPTED and the
dispatcher continues it on a pair. A lease that ends uncommitted leaves its pages in quarantine until the lease
book says that no bytes land in them (`PagesReleased`); its job is gone at once.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    LoadReport,
    Outcome,
    RefusalReason,
    RenewLease,
    Started,
    Stroke,
    Submit,
    TokenRun,
    WorkerInfo,
)
from twostroke.cluster.core.sampling import FinishReason
from twostroke.decode_worker.job import DecodeJob, timings
from twostroke.decode_worker.leases import LeaseDesk
from twostroke.decode_worker.queues import Queues
from twostroke.engine.commands import (
    Command,
    Committed,
    Event,
    FromRouter,
    LeaseRenewed,
    LeaseTouched,
    PagesReleased,
    RouterGone,
)
from twostroke.engine.job import (
    JobPhase,
    PlanBuilder,
    hit_keys,
    name_filled_pages,
    release_pages,
    take_pages,
    take_scores,
)
from twostroke.engine.plan import Constraint, Plan, StepResult
from twostroke.engine.roster import Roster


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """`config.DecodeSection`, as far as scheduling goes. The token budget of a step is `info.chunk_tokens`."""

    max_running: int = 256
    max_waiting: int = 64
    lease_ttl_s: float = 30.0
    max_preemptions: int = 2
    local_resume_tokens: int = 256


def _draw_nonce() -> bytes:
    return secrets.token_bytes(16)


class DecodeScheduler:
    """Implements `engine.scheduling.RoleScheduler`; used by the engine thread alone.

    `draw_nonce` gives the 16 secret bytes that a writer must show, new for each epoch of a lease.
    """

    def __init__(
        self,
        info: WorkerInfo,
        vocab_size: int,
        limits: DecodeLimits,
        draw_nonce: Callable[[], bytes] = _draw_nonce,
    ) -> None:
        self._roster: Roster[DecodeJob] = Roster(info, vocab_size)
        self._info = info
        self._page_size = info.layout.page_size
        self._limits = limits
        self._leases = LeaseDesk(self._roster, limits.lease_ttl_s, draw_nonce)
        # Every running job gets a token a step, so a smaller budget bounds them too; then prompts never starve.
        self._max_running = min(limits.max_running, info.chunk_tokens)
        self._allocator = self._roster.allocator
        self._outbox = self._roster.outbox
        self._queues = Queues(self._roster, self._leases)

    # ---------------------------------------------------------------------------------------------- commands

    def handle(self, command: Command, now_s: float) -> None:
        match command:
            case FromRouter(router, Submit() as submit, constraint):
                self._submit(router, submit, constraint, now_s)
            case FromRouter(router, Cancel(job_id)):
                job = self._roster.find(router, job_id)
                if job is not None:
                    self._end(job, Outcome.CANCELLED, now_s)
            case FromRouter(router, RenewLease(job_id, bump_epoch)):
                job = self._roster.find(router, job_id)
                if job is not None:
                    self._leases.renew(job, bump_epoch, now_s)
            case Committed():
                self._commit(command, now_s)
            case LeaseRenewed(lease_id, epoch):
                self._leases.renewed(lease_id, epoch)
            case LeaseTouched(lease_id):
                self._leases.touch(lease_id, now_s)
            case PagesReleased(lease_id):
                self._leases.release(lease_id)
            case RouterGone(router):
                for job in self._roster.of_router(router):
                    self._end(job, Outcome.CANCELLED, now_s, message="its router is gone")
                self._outbox.forget(router)
            case _:
                self._roster.handle(command)

    def _submit(self, router: Incarnation, submit: Submit, constraint: Constraint | None, now_s: float) -> None:
        refusal = self._find_refusal(submit, constraint)
        if refusal is not None:
            self._roster.refuse(router, submit, *refusal)
            return
        phase = JobPhase.WAITING if submit.stroke is Stroke.LOCAL else JobPhase.LEASED
        job = DecodeJob.of(submit, router, self._info.layout, phase, now_s, constraint)
        if submit.stroke is Stroke.LOCAL:
            self._roster.add(job)
            self._queues.waiting.append(job)
        else:
            self._reserve(job, now_s)

    def _find_refusal(self, submit: Submit, constraint: Constraint | None) -> tuple[RefusalReason, str] | None:
        if submit.stroke is Stroke.PREFILL:
            return RefusalReason.WRONG_ROLE, "a decode worker prefills only what it decodes itself (local)"
        refusal = self._roster.find_refusal(submit, constraint)
        if refusal is not None:
            return refusal
        num_tokens = len(submit.prompt) + max(submit.sampling.max_tokens, len(submit.delivered) + 1)
        refusal = self._roster.find_too_large(num_tokens)
        if refusal is not None:
            return refusal
        num_waiting, num_ready, num_leases = len(self._queues.waiting), len(self._queues.ready), len(self._leases)
        if submit.stroke is Stroke.LOCAL:
            if num_waiting >= self._limits.max_waiting:
                return RefusalReason.QUEUE_FULL, f"{num_waiting} jobs wait here"
        elif num_leases + num_ready >= self._limits.max_running + self._limits.max_waiting:
            return RefusalReason.QUEUE_FULL, f"{num_leases} leases and {num_ready} ready jobs are here"
        return None

    # ---------------------------------------------------------------------------------------------- leases

    def _reserve(self, job: DecodeJob, now_s: float) -> None:
        held = self._allocator.lookup(hit_keys(job, self._page_size))
        num_new = self._queues.pages_wanted(job) - len(held)
        if self._queues.room_for_lease(held, num_new):
            self._leases.open(job, held, num_new, now_s)
        else:
            message = f"{num_new} pages wanted, {self._allocator.num_available} free or evictable, some spoken for"
            self._roster.refuse(job.router, job.submit, RefusalReason.NO_PAGES, message)

    def _commit(self, commit: Committed, now_s: float) -> None:
        job = self._leases.take_committed(commit)
        if job is None:
            return
        job.advance(JobPhase.READY)
        self._queues.ready.append(job)
        if commit.first_token_index != len(job.output) or not 0 <= commit.first_token < self._roster.vocab_size:
            message = f"the commit's first token {commit.first_token} at index {commit.first_token_index} is not ours"
            self._end(job, Outcome.FAILED, now_s, message=message)
            return
        self._tell_started(job, commit.first_token, commit.first_logprob)
        job.first_token_s = now_s
        self._take_token(job, commit.first_token, now_s, tell=False)  # Started told it, as the prefill side did

    # ----------------------------------------------------------------------------------------------- steps

    def plan(self, now_s: float) -> Plan | None:
        for job_id in self._roster.deadlines.pop_expired(now_s):
            self._expire(self._roster.jobs[job_id], now_s)
        ready, running = self._queues.ready, self._queues.running
        while ready and len(running) < self._max_running:
            self._run(ready.popleft(), now_s)
        builder = PlanBuilder(self._page_size)
        budget = self._info.chunk_tokens
        prompts: list[DecodeJob] = []
        for job in list(running.values()):
            if job.phase is not JobPhase.RUNNING:
                continue  # preempted or ended for the sake of an earlier one
            num_tokens = len(job.tokens)
            if num_tokens - job.num_computed > 1:
                prompts.append(job)
            elif len(job.pages) * self._page_size >= num_tokens or self._grow(job, now_s):
                builder.add(job, 1)
                budget -= 1
        # Only the latest-admitted are preempted, so nothing in `builder` lost its pages; a prompt may have.
        for job in prompts:
            if budget > 0 and job.phase is JobPhase.RUNNING:
                budget -= builder.add_chunk(job, budget)
        while budget > 0 and self._admit_next(now_s):
            budget -= builder.add_chunk(next(reversed(running.values())), budget)
        plan = builder.build()
        if plan is None:
            self._roster.step_idle(now_s)
        return plan

    def _run(self, job: DecodeJob, now_s: float) -> None:
        job.advance(JobPhase.RUNNING)
        if job.admitted_s is None:
            job.admitted_s = now_s
        self._queues.running[job.id] = job

    def _admit_next(self, now_s: float) -> bool:
        """Start the first waiting job, if there is one and its pages are there; it never preempts."""
        waiting = self._queues.waiting
        while waiting and len(self._queues.running) < self._max_running:
            job = waiting[0]
            held = self._allocator.lookup(hit_keys(job, self._page_size))
            if job.preemptions and self._is_too_far(job, len(held)):
                self._end(job, Outcome.PREEMPTED, now_s, message="too much of it is no longer cached")
                continue
            num_new = self._queues.pages_wanted(job) - len(held)
            if not self._queues.room_for_waiting(held, num_new):
                return False
            take_pages(job, held, num_new, self._allocator, self._page_size)
            waiting.popleft()
            self._run(job, now_s)
            if not job.started:
                job.cached_tokens = job.num_computed
                self._tell_started(job)
            return True
        return False

    def _grow(self, job: DecodeJob, now_s: float) -> bool:
        """Give the job a page for its newest token; False when it cannot take part in this step."""
        while self._allocator.num_available == 0:
            if len(self._queues.ready) + len(self._queues.running) == 1:
                return False  # the only one waits: leases and quarantine end within a bounded time
            victim = self._queues.latest
            self._preempt(victim, now_s)
            if victim is job:
                return False
        job.pages += self._allocator.allocate(1)
        return True

    def _preempt(self, job: DecodeJob, now_s: float) -> None:
        self._queues.leave(job)
        job.advance(JobPhase.WAITING)
        self._queues.waiting.appendleft(job)
        release_pages(job, self._allocator)
        job.preemptions += 1
        num_held = len(self._allocator.lookup(hit_keys(job, self._page_size)))
        if job.preemptions > self._limits.max_preemptions or self._is_too_far(job, num_held):
            self._end(job, Outcome.PREEMPTED, now_s, message="out of pages")

    def _is_too_far(self, job: DecodeJob, num_held: int) -> bool:
        """Whether resuming here would compute too many tokens again."""
        return len(job.tokens) - num_held * self._page_size > self._limits.local_resume_tokens

    def apply(self, plan: Plan, result: StepResult, now_s: float) -> None:
        self._roster.step_ended(now_s)
        page_size, running = self._page_size, self._queues.running
        late = {plan.jobs[row] for row in result.late}
        logprobs, scores = result.logprobs, result.scores
        for job_id, num_new, token in zip(plan.jobs, plan.num_new, result.tokens, strict=True):
            job = running.get(job_id)
            if job is None or job_id in late:
                continue
            if scores and job_id in scores:
                self._outbox.tell(job.router, take_scores(job, scores[job_id]))
            job.num_computed += num_new
            job.computed_tokens += num_new
            if job.num_computed // page_size > job.num_named:
                name_filled_pages(job, self._allocator, page_size)
            if token is not None:
                if job.first_token_s is None:
                    job.first_token_s = now_s
                self._take_token(job, token, now_s, tell=True, logprob=logprobs.get(job_id) if logprobs else None)
        for row, reason in result.broken.items():
            job = running.get(plan.jobs[row])
            if job is not None:
                self._end(job, Outcome.BROKEN_GRAMMAR, now_s, message=reason)

    def _take_token(
        self, job: DecodeJob, token: int, now_s: float, *, tell: bool, logprob: TokenLogprob | None = None
    ) -> None:
        """The next output token is known; end the job if it ends the answer (or none was wanted)."""
        sampling, output = job.submit.sampling, job.output
        num_output = len(output)
        if num_output >= sampling.max_tokens:
            self._end(job, Outcome.FINISHED, now_s, finish_reason=FinishReason.LENGTH)
            return
        job.tokens.append(token)
        output.append(token)
        if tell:
            self._roster.generated_tokens += 1
            logprobs = () if logprob is None else (logprob,)
            self._outbox.tokens(job.router, TokenRun(job.submit.job, num_output, (token,), logprobs))
        finish_reason = sampling.finish_after(num_output + 1, token)
        if finish_reason is not None:
            self._end(job, Outcome.FINISHED, now_s, finish_reason=finish_reason)

    def fail(self, plan: Plan, message: str, now_s: float) -> None:
        self._roster.step_ended(now_s)
        for job_id in plan.jobs:
            job = self._queues.running.get(job_id)
            if job is not None:
                self._end(job, Outcome.FAILED, now_s, message=message)

    # ------------------------------------------------------------------------------------------------ ends

    def _expire(self, job: DecodeJob, now_s: float) -> None:
        late = now_s >= job.deadline_s
        self._end(job, Outcome.EXPIRED, now_s, message="its time was up" if late else "its lease ran out")

    def _tell_started(
        self, job: DecodeJob, first_token: int | None = None, first_logprob: TokenLogprob | None = None
    ) -> None:
        job.started = True
        self._outbox.tell(job.router, Started(job.id, job.cached_tokens, first_token, first_logprob))

    def _end(
        self,
        job: DecodeJob,
        outcome: Outcome,
        now_s: float,
        *,
        finish_reason: FinishReason | None = None,
        message: str = "",
    ) -> None:
        """The one end of a job, from any phase."""
        self._queues.leave(job)
        release_pages(job, self._allocator)
        self._roster.remove(job)
        self._outbox.ended(
            job.router, Ended(job.id, outcome, finish_reason, len(job.output), message, timings(job, now_s))
        )

    # --------------------------------------------------------------------------------------------- reading

    def take_events(self) -> list[Event]:
        return self._roster.take_events()

    def load(self, now_s: float) -> LoadReport:
        queues = self._queues
        return self._roster.load(
            now_s,
            running=len(queues.running),
            waiting=len(queues.waiting) + len(queues.ready),
            leases=len(self._leases),
            uncomputed=[*queues.waiting, *(job for job in queues.running.values() if job.first_token_s is None)],
        )

    def snapshot(self) -> PrefixSnapshot:
        return self._roster.snapshot()

    def next_deadline_s(self) -> float | None:
        return self._roster.deadlines.next_s()

    @property
    def idle(self) -> bool:
        return not self._roster.jobs and self._leases.at_rest

    @property
    def ignored(self) -> dict[str, int]:
        """How many commands were about something that is not here (any more), by kind."""
        return dict(self._roster.ignored)

    def free_pages(self) -> tuple[PageId, ...]:
        """Pages that nobody may read or write now; for tests, which poison them."""
        return self._allocator.free_pages()

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
        self._queues.check_integrity()
        self._leases.check_integrity()
