"""Where each job of a decode worker is, and how many pages that leaves for another. Pure.

    waiting   local prompts, and preempted jobs before them    ready     committed, not yet in a step
    running   in order of admission                            leased    at the lease desk

The scheduler decides who moves; here is counted what that costs.
"""

from collections import deque
from collections.abc import Sequence

from twostroke.cluster.core.ids import JobId, PageId
from twostroke.decode_worker.job import DecodeJob
from twostroke.decode_worker.leases import LeaseDesk
from twostroke.engine.job import JobPhase, pages_for
from twostroke.engine.roster import Roster


class Queues:
    """Part of one decode scheduler."""

    def __init__(self, roster: Roster[DecodeJob], leases: LeaseDesk) -> None:
        self._roster = roster
        self._leases = leases
        self.waiting: deque[DecodeJob] = deque()
        self.ready: deque[DecodeJob] = deque()
        self.running: dict[JobId, DecodeJob] = {}

    @property
    def latest(self) -> DecodeJob:
        """The latest-admitted job; there must be one."""
        return self.ready[-1] if self.ready else next(reversed(self.running.values()))

    def leave(self, job: DecodeJob) -> None:
        """Take the job out of wherever its phase says that it is."""
        match job.phase:
            case JobPhase.WAITING:
                self.waiting.remove(job)
            case JobPhase.READY:
                self.ready.remove(job)
            case JobPhase.RUNNING:
                del self.running[job.id]
            case JobPhase.LEASED:
                self._leases.close(job)

    def pages_wanted(self, job: DecodeJob) -> int:
        """Pages of the job with its next token, cached ones included."""
        return pages_for(len(job.tokens) + 1, self._roster.page_size)

    def room_for_lease(self, held: Sequence[PageId], num_new: int) -> bool:
        """Whether every job and lease could take one page more afterwards, and those that wait all of theirs: without
        this, a stream of leases could starve them.
        """
        spoken_for = sum(map(self.pages_wanted, self.waiting))
        return self._left_after(held, num_new + spoken_for) >= self._num_growing + len(self.waiting)

    def room_for_waiting(self, held: Sequence[PageId], num_new: int) -> bool:
        """The same for the first of those that wait."""
        return self._left_after(held, num_new) >= self._num_growing

    @property
    def _num_growing(self) -> int:
        """Jobs and leases that may want one page more each."""
        return len(self.running) + len(self.ready) + len(self._leases)

    def _left_after(self, held: Sequence[PageId], num_new: int) -> int:
        """Pages left, free or evictable, once `held` are retained and `num_new` taken; may be negative."""
        allocator = self._roster.allocator
        return allocator.num_available - allocator.count_cached(held) - num_new

    def check_integrity(self) -> None:
        """Raise AssertionError unless each job is in the queue of its phase, and all pages are the jobs'."""
        by_phase = {
            JobPhase.WAITING: list(self.waiting),
            JobPhase.READY: list(self.ready),
            JobPhase.RUNNING: list(self.running.values()),
            JobPhase.LEASED: self._leases.jobs(),
        }
        held: dict[int, int] = {}
        for phase, jobs in by_phase.items():
            for job in jobs:
                assert job.phase is phase, f"job {job.id} is {job.phase} in the queue for {phase}"
                assert self._roster.jobs.get(job.id) is job, f"job {job.id} is queued, but gone"
                assert (phase is JobPhase.LEASED) == bool(job.leased_pages), f"{phase} job {job.id}, leased pages"
                for page in job.pages:
                    held[page] = held.get(page, 0) + 1
        assert sum(map(len, by_phase.values())) == len(self._roster.jobs), "a job is in no queue, or in two"
        self._roster.allocator.check_references(held)
