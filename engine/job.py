"""A job: a worker's record of one attempt at one choice, and what both roles do with it. Pure.

    prefill   WAITING -> RUNNING -> SHIPPING -> gone       ended while its pages are read: -> DROPPED -> gone
    decode    LEASED -> READY -> RUNNING -> gone           local: WAITING -> RUNNING -> gone
              READY | RUNNING -> WAITING                   preempted: pages given back, resumes here

A job has `num_tokens` tokens (prompt, delivered and generated), of which the KV of the first `num_computed` is
in its pages. A step lets the second catch up with the first by some tokens under a budget; that alone covers
chunked prefill, prefix hits, decode and local prefill. When it has caught up, the step sampled a token:

    tokens   [ prompt ............ | delivered | generated ]
    pages    [ p0 ][ p1 ][ p2 ][ p3 ]            pages[i] holds positions i * page_size ...
    named     ^^^^  ^^^^  only full pages that an applied step (or a verified commit) filled
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.ids import Incarnation, JobId, PageId, PrefixKey
from twostroke.cluster.core.layout import PageLayout
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import PromptLogprobs, Submit
from twostroke.cluster.core.prefix import child_key, max_hit_pages, page_keys, root_key
from twostroke.engine.page_allocator import PageAllocator
from twostroke.engine.plan import Constraint, Plan, SampleInput, ScoreInput

MAX_SCORED = 64
"""Prompt tokens that one step scores at most: their logits are a matrix of `[this, vocab]`."""


class JobPhase(Enum):
    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    RUNNING = "running"
    SHIPPING = "shipping"
    DROPPED = "dropped"


_TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.WAITING: frozenset({JobPhase.RUNNING}),
    JobPhase.LEASED: frozenset({JobPhase.READY}),
    JobPhase.READY: frozenset({JobPhase.RUNNING, JobPhase.WAITING}),
    JobPhase.RUNNING: frozenset({JobPhase.SHIPPING, JobPhase.WAITING, JobPhase.DROPPED}),
    JobPhase.SHIPPING: frozenset({JobPhase.DROPPED}),
    JobPhase.DROPPED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Job:
    """Changed only by its role's scheduler and the functions below."""

    router: Incarnation
    submit: Submit
    tokens: list[int]
    output: list[int]
    """Delivered and generated tokens; also the tail of `tokens`."""
    root: PrefixKey
    keys: list[PrefixKey]
    """Of full pages, as far as they are known."""
    submitted_s: float
    deadline_s: float
    phase: JobPhase
    constraint: Constraint | None = None
    sample: SampleInput = field(init=False)
    """Borrows `output`, so it is made once."""
    pages: list[PageId] = field(default_factory=list)
    num_computed: int = 0
    num_named: int = 0
    """Leading pages that are named, by this job or by a twin."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_scored: int = 1
    """Leading prompt tokens whose log-probabilities were told; the first has none and counts."""

    @classmethod
    def of(
        cls,
        submit: Submit,
        router: Incarnation,
        layout: PageLayout,
        phase: JobPhase,
        now_s: float,
        constraint: Constraint | None = None,
    ) -> Self:
        """A job as its Submit begins it, without pages."""
        root, keys = prompt_keys(submit, layout.model_fingerprint, layout.page_size)
        return cls(
            router=router,
            submit=submit,
            tokens=[*submit.prompt, *submit.delivered],
            output=list(submit.delivered),
            root=root,
            keys=keys,
            submitted_s=now_s,
            deadline_s=now_s + submit.time_left_s,
            phase=phase,
            constraint=constraint,
        )

    def __post_init__(self) -> None:
        self.sample = SampleInput(self.submit.sampling, self.submit.prompt, self.output, self.constraint)

    @property
    def id(self) -> JobId:
        return self.submit.job

    @property
    def num_left(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def is_scoring(self) -> bool:
        """Log-probabilities of its prompt are wanted, and not all told yet."""
        submit = self.submit
        return submit.sampling.prompt_logprobs is not None and self.num_scored < len(submit.prompt)

    def advance(self, to: JobPhase) -> None:
        """The only place that changes a phase. Raises InternalError for a move outside the table."""
        if to not in _TRANSITIONS[self.phase]:
            raise InternalError(f"job {self.id}: illegal phase change {self.phase.value} -> {to.value}")
        self.phase = to


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill or touch."""
    return -(-num_tokens // page_size)


def find_fault(submit: Submit, vocab_size: int) -> str | None:
    """What no edge should have let through (BAD_SUBMIT), or None."""
    if not submit.prompt:
        return "the prompt is empty"
    for name, tokens in (("prompt", submit.prompt), ("delivered", submit.delivered)):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
            return f"{name} has a token id outside the vocabulary of {vocab_size}"
    if submit.delivered and len(submit.delivered) >= submit.sampling.max_tokens:
        return "every token of the answer was delivered already"
    return None


def prompt_keys(submit: Submit, fingerprint: str, page_size: int) -> tuple[PrefixKey, list[PrefixKey]]:
    """Root, and keys of the full pages of prompt + delivered."""
    root = root_key(fingerprint, page_size, submit.adapter, submit.salt)
    return root, page_keys(root, submit.prompt + submit.delivered, page_size)


def hit_keys(job: Job, page_size: int) -> Sequence[PrefixKey]:
    """Keys that a prefix hit may cover: never the page of the last token, whose logits must be computed, nor one with
    a prompt token that is still to be scored on the next.
    """
    if job.is_scoring:
        return job.keys[: (job.num_scored - 1) // page_size]
    return job.keys[: max_hit_pages(len(job.tokens), page_size)]


def take_scores(job: Job, scores: tuple[TokenLogprob, ...]) -> PromptLogprobs:
    """What to tell of the step that is being applied; before it counts as computed."""
    first = job.num_computed + 1
    job.num_scored = first + len(scores)
    return PromptLogprobs(job.id, first, scores)


def take_pages(job: Job, held: Sequence[PageId], num_new: int, allocator: PageAllocator, page_size: int) -> None:
    """Give the job its cached prefix and `num_new` fresh pages. Raises OutOfPages and changes nothing."""
    allocator.retain(held)
    try:
        fresh = allocator.allocate(num_new)
    except Exception:
        allocator.release(held, job.keys)
        raise
    job.pages = [*held, *fresh]
    job.num_named = len(held)
    job.num_computed = len(held) * page_size


def name_filled_pages(job: Job, allocator: PageAllocator, page_size: int) -> None:
    """Name the full pages whose computation is in `num_computed`, which only applied steps and commits raise."""
    for index in range(job.num_named, job.num_computed // page_size):
        if index == len(job.keys):
            parent = job.keys[-1] if job.keys else job.root
            job.keys.append(child_key(parent, job.tokens[index * page_size : (index + 1) * page_size]))
        allocator.name(job.pages[index], job.keys[index])
        job.num_named = index + 1


def release_pages(job: Job, allocator: PageAllocator) -> None:
    """Give back every page of the job, exactly once: it has none afterwards."""
    pages, job.pages = job.pages, []
    allocator.release(pages, job.keys[: job.num_named])
    job.num_named = 0
    job.num_computed = 0


class PlanBuilder:
    """Collects the rows of one step and orders them: rows of one token first (see `engine.plan`).

    At 256 rows this is most of a step's Python, hence columns by comprehension.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._single: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._scored: dict[JobId, ScoreInput] = {}
        self._score_room = MAX_SCORED

    def add(self, job: Job, num_new: int) -> None:
        if num_new == 1:
            self._single.append(job)
        else:
            self._chunks.append((job, num_new))

    def add_chunk(self, job: Job, budget: int) -> int:
        """Add a part of a prompt (or what else is to be computed before the next token is); how many tokens."""
        num_new = min(budget, job.num_left)
        if job.is_scoring:
            num_new = min(num_new, self._score_room)
            prompt, first = job.submit.prompt, job.num_computed + 1
            targets = prompt[first : first + num_new]
            assert job.submit.sampling.prompt_logprobs is not None
            if targets:
                self._scored[job.id] = ScoreInput(job.submit.sampling.prompt_logprobs, targets)
                self._score_room -= num_new
        if num_new:
            self.add(job, num_new)
        return num_new

    def build(self) -> Plan | None:
        """None when nothing was added. The plan borrows the jobs' own lists until it is applied."""
        single = self._single
        if not single and not self._chunks:
            return None
        plan = Plan(
            jobs=[job.submit.job for job in single],
            num_computed=[job.num_computed for job in single],
            num_new=[1] * len(single),
            tokens=[job.tokens[job.num_computed] for job in single],
            page_tables=[self._page_table(job, job.num_computed + 1) for job in single],
            sample=[job.sample if job.num_computed + 1 == len(job.tokens) else None for job in single],
        )
        for job, num_new in self._chunks:
            end = job.num_computed + num_new
            plan.jobs.append(job.submit.job)
            plan.num_computed.append(job.num_computed)
            plan.num_new.append(num_new)
            plan.tokens.extend(job.tokens[job.num_computed : end])
            plan.page_tables.append(self._page_table(job, end))
            plan.sample.append(job.sample if end == len(job.tokens) else None)
        if self._scored:
            plan.score.update((row, self._scored[job]) for row, job in enumerate(plan.jobs) if job in self._scored)
        return plan

    def _page_table(self, job: Job, end: int) -> Sequence[PageId]:
        num_pages = -(-end // self._page_size)
        return job.pages if len(job.pages) == num_pages else job.pages[:num_pages]
