"""A decode worker's record of a job, beyond what both roles keep. Pure."""

from dataclasses import dataclass, field

from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.messages import JobTimings, Lease, Stroke
from twostroke.engine.job import Job


@dataclass(slots=True, eq=False)
class DecodeJob(Job):
    lease: Lease | None = None
    leased_pages: list[PageId] = field(default_factory=list)
    """Not the job's before the commit; one more than the lease shows when the next token starts a page."""
    preemptions: int = 0
    started: bool = False


def timings(job: DecodeJob, now_s: float) -> JobTimings:
    admitted_s = now_s if job.admitted_s is None else job.admitted_s
    first_token_s = now_s if job.first_token_s is None else job.first_token_s
    local = job.submit.stroke is Stroke.LOCAL
    return JobTimings(
        queue_s=admitted_s - (job.submitted_s if local else min(first_token_s, admitted_s)),
        prefill_s=first_token_s - admitted_s if local else 0.0,
        decode_s=now_s - first_token_s,
        cached_tokens=job.cached_tokens,
        computed_tokens=job.computed_tokens,
        preemptions=job.preemptions,
    )
