"""Leases of a decode worker: page reservations that prefill workers fill. Pure.

    open      references on the leading cached pages, fresh pages LEASED for the rest; LeaseOpened, Leased
    renew     another TTL; with `bump_epoch` a new epoch and nonce, LeaseOpened again: whatever an older writer still
              sends is unacceptable
    renewed   the book took the new epoch: Leased again. If a commit was there first, it says nothing, so that nobody
              is ever asked to fill a lease that takes no writer any more
    touch     a chunk was accepted: another TTL
    committed the book verified a writer's whole transfer: the pages are the job's; LeaseClosed(committed). Also of an
              older epoch: it came before the renewal reached the book
    close     ended uncommitted: the pages wait in quarantine, since bytes may be landing in them; LeaseClosed
    release   the lease book says that none are: the pages are free

The scheduler decides whether a lease is granted and what becomes of its job.
"""

from collections.abc import Callable
from dataclasses import replace

from twostroke.cluster.core.ids import LeaseId, PageId
from twostroke.cluster.core.messages import Lease, Leased, LeaseShard
from twostroke.decode_worker.job import DecodeJob
from twostroke.engine.commands import Committed, LeaseClosed, LeaseOpened
from twostroke.engine.job import JobPhase, name_filled_pages, pages_for
from twostroke.engine.roster import Roster


class LeaseDesk:
    """Part of one decode scheduler. Every lease ends exactly once; what comes later about it is counted, no more."""

    def __init__(self, roster: Roster[DecodeJob], ttl_s: float, draw_nonce: Callable[[], bytes]) -> None:
        self._roster = roster
        self._ttl_s = ttl_s
        self._draw_nonce = draw_nonce
        self._open: dict[LeaseId, DecodeJob] = {}
        self._quarantine: dict[LeaseId, list[PageId]] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def at_rest(self) -> bool:
        """No lease is open and no page is in quarantine."""
        return not self._open and not self._quarantine

    def jobs(self) -> list[DecodeJob]:
        return list(self._open.values())

    def open(self, job: DecodeJob, held: list[PageId], num_new: int, now_s: float) -> None:
        """The pages must be available, which the caller has checked; the job gets them and joins the roster."""
        info, page_size, allocator = self._roster.info, self._roster.page_size, self._roster.allocator
        allocator.retain(held)
        job.pages, job.num_named, job.cached_tokens = held, len(held), len(held) * page_size
        job.leased_pages = allocator.lease(num_new)
        # A page that only the next token will start is reserved, but there is nothing to ship into it.
        num_shipped = pages_for(len(job.tokens), page_size) - len(held)
        shipped = tuple(job.leased_pages[:num_shipped])
        self._num_opened += 1
        job.lease = Lease(
            lease_id=LeaseId(f"{info.incarnation}.{self._num_opened}"),
            job=job.id,
            epoch=1,
            nonce=self._draw_nonce(),
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            layout=info.layout,
            transports=info.transports,
            device=info.device,
            num_held=len(held),
            shards=(LeaseShard(0, info.address, 0, info.layout.groups[0].kv_heads, shipped),),
            ttl_s=self._ttl_s,
        )
        self._open[job.lease.lease_id] = job
        self._roster.add(job)
        self._extend(job, now_s)
        self._roster.outbox.event(LeaseOpened(job.lease))
        self._roster.outbox.tell(job.router, Leased(job.id, job.lease))

    def renew(self, job: DecodeJob, bump_epoch: bool, now_s: float) -> None:
        if job.phase is not JobPhase.LEASED or job.lease is None:
            self._roster.ignored["RenewLease"] += 1
        elif bump_epoch:
            job.lease = replace(job.lease, epoch=job.lease.epoch + 1, nonce=self._draw_nonce())
            self._extend(job, now_s)
            self._roster.outbox.event(LeaseOpened(job.lease))
        else:
            self._extend(job, now_s)

    def renewed(self, lease_id: LeaseId, epoch: int) -> None:
        job = self._open.get(lease_id)
        if job is None or job.lease is None or job.lease.epoch != epoch:
            self._roster.ignored["LeaseRenewed"] += 1
        else:
            self._roster.outbox.tell(job.router, Leased(job.id, job.lease))

    def touch(self, lease_id: LeaseId, now_s: float) -> None:
        job = self._open.get(lease_id)
        if job is None:
            self._roster.ignored["LeaseTouched"] += 1
        else:
            self._extend(job, now_s)

    def take_committed(self, commit: Committed) -> DecodeJob | None:
        """The job with all of its pages, computed and named; None when its lease has ended or is not the job's."""
        job = self._open.get(commit.lease_id)
        if job is None or job.lease is None or commit.epoch > job.lease.epoch or commit.job != job.id:
            self._roster.ignored["Committed"] += 1
            return None
        del self._open[commit.lease_id]
        allocator = self._roster.allocator
        allocator.commit_lease(job.leased_pages)
        job.pages, job.leased_pages = job.pages + job.leased_pages, []
        job.num_computed = len(job.tokens)
        name_filled_pages(job, allocator, self._roster.page_size)
        self._roster.deadlines.set(job.id, job.deadline_s)
        self._roster.outbox.event(LeaseClosed(commit.lease_id, committed=True))
        return job

    def close(self, job: DecodeJob) -> None:
        """End the lease of a job that ends uncommitted."""
        assert job.lease is not None, f"job {job.id} has no lease"
        lease_id = job.lease.lease_id
        del self._open[lease_id]
        pages, job.leased_pages = job.leased_pages, []
        self._quarantine[lease_id] = pages
        self._roster.allocator.quarantine(pages)
        self._roster.outbox.event(LeaseClosed(lease_id, committed=False))

    def release(self, lease_id: LeaseId) -> None:
        pages = self._quarantine.pop(lease_id, None)
        if pages is None:
            self._roster.ignored["PagesReleased"] += 1
        else:
            self._roster.allocator.end_quarantine(pages)

    def check_integrity(self) -> None:
        """Raise AssertionError unless leased and quarantined pages are exactly those of the leases here."""
        ledger = self._roster.allocator.ledger()
        num_leased = sum(len(job.leased_pages) for job in self._open.values())
        assert ledger.leased == num_leased, f"{ledger.leased} pages leased, jobs know of {num_leased}"
        num_quarantined = sum(map(len, self._quarantine.values()))
        assert ledger.quarantined == num_quarantined, f"{ledger.quarantined} in quarantine, not {num_quarantined}"

    def _extend(self, job: DecodeJob, now_s: float) -> None:
        self._roster.deadlines.set(job.id, min(job.deadline_s, now_s + self._ttl_s))
