"""Drive an executor by hand: plans for single jobs and for mixed batches, without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.cluster.core.ids import JobId, PageId, RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.executor import Executor
from twostroke.engine.plan import Plan, SampleInput

GREEDY = SamplingParams(max_tokens=1 << 20)


@dataclass
class HandJob:
    """A job whose pages and progress the test decides."""

    prompt: list[int]
    pages: list[PageId]
    params: SamplingParams = GREEDY
    name: str = "job"
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def plan_of(rows: Sequence[tuple[HandJob, int]]) -> Plan:
    """One step: each job with how many of its tokens to compute."""
    plan = Plan([], [], [], [], [], [])
    for job, count in rows:
        end = job.num_computed + count
        plan.jobs.append(JobId(RequestId(job.name), 0, 0))
        plan.num_computed.append(job.num_computed)
        plan.num_new.append(count)
        plan.tokens.extend(job.tokens[job.num_computed : end])
        plan.page_tables.append(job.pages)
        plan.sample.append(SampleInput(job.params, job.prompt, job.output) if end == len(job.tokens) else None)
    return plan


def step(executor: Executor, rows: Sequence[tuple[HandJob, int]]) -> list[int | None]:
    tokens = executor.launch(plan_of(rows)).result().tokens
    for (job, count), token in zip(rows, tokens, strict=True):
        job.num_computed += count
        if token is not None:
            job.output.append(token)
    return tokens


def generate(executor: Executor, job: HandJob, num: int, chunk: int = 1 << 20) -> list[int]:
    """Prefill in chunks, then decode alone, until `num` output tokens exist."""
    while len(job.output) < num:
        step(executor, [(job, min(chunk, len(job.tokens) - job.num_computed))])
    return job.output


def scattered_pages(num_pages: int, count: int, seed: int) -> list[PageId]:
    """`count` distinct pages in no order: what a fragmented pool hands out (FIELD-REPORTS B17)."""
    import random

    return [PageId(page) for page in random.Random(seed).sample(range(num_pages), count)]
