"""The lease book: which pages of which lease may be written, are being written, are verified.

Life of a lease here (the engine thread opens and closes; transport threads write and commit):

    1. open(lease)             all pages missing; writers must show lease id, epoch and nonce
    2. begin(write)            missing | verified -> writing; the pages are claimed by a ticket, the bytes are coming
       land(ticket)            the bytes are all here and are written to the pages
    3. end(ticket, verified)   writing -> verified, or back to missing; a verified end touches the lease
    4. commit(...)             all verified and nothing under way -> committed; `on_committed` hands the job over.
                               From here on nobody may write. An equal commit is acknowledged again.
    5. open(higher epoch)      a renewal: every page is missing again, older writers are refused; `on_renewed`. An older
                               write that has not landed may not any more; a page on which one is landing cannot be
                               begun until that write ends. A commit that came first stands: the renewal changes
                               nothing and is not announced, so nobody gets credentials that would be refused.
    6. close(lease, committed) nothing may land any more. If uncommitted, `on_released` follows once no write is
                               landing, exactly once: until then the pages are quarantined. Forgotten with the end
                               of the last write under way.

The book counts writes; it never moves bytes. Its lock covers dictionary work only and is not held in callbacks.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import NamedTuple

from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import InternalError, LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import JobId, LeaseId
from twostroke.cluster.core.layout import PageLayout, check_compatible
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import CommitRequest, PageWrite, WriteTicket
from twostroke.engine.commands import Committed, LeaseRenewed

MISSING, WRITING, VERIFIED = 0, 1, 2
TOUCH_INTERVAL_S = 0.5
"""The engine's inbox hears of one accepted chunk a lease in this time."""
REMEMBERED_COMMITS = 1024
"""Commits acknowledged again after their lease was closed; a sender repeats one only within seconds."""


@dataclass(slots=True)
class _Record:
    lease: Lease
    states: bytearray
    """One of MISSING, WRITING, VERIFIED for each page of the lease."""
    writes: dict[int, WriteTicket] = field(default_factory=dict)
    landing: set[int] = field(default_factory=set)
    """Tickets whose bytes are being written to the pages."""
    committed: CommitRequest | None = None
    aborted: str | None = None
    """Why the writer of the present epoch gave up; it may not come back."""
    touched_at_s: float = float("-inf")
    closed: bool = False
    unreleased: bool = False
    """Closed uncommitted, and `on_released` is still to come."""


class _Remembered(NamedTuple):
    commit: CommitRequest
    job: JobId


class LeaseBook:
    """Implements `transport.base.Intake`. Every method may be called from any thread and does not block.

    Callbacks run on the calling thread, outside the lock; they must only post to the engine's inbox.
    """

    def __init__(
        self,
        layout: PageLayout,
        on_committed: Callable[[Committed], None],
        on_touched: Callable[[LeaseId], None],
        on_released: Callable[[LeaseId], None],
        on_renewed: Callable[[LeaseRenewed], None],
        clock: Clock | None = None,
    ) -> None:
        self._layout = layout
        self._on_committed = on_committed
        self._on_touched = on_touched
        self._on_released = on_released
        self._on_renewed = on_renewed
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._records: dict[LeaseId, _Record] = {}
        self._remembered: OrderedDict[LeaseId, _Remembered] = OrderedDict()
        self._next_ticket = 0

    @property
    def layout(self) -> PageLayout:
        return self._layout

    @property
    def num_open(self) -> int:
        """Leases that are open, or closed with a write still under way."""
        with self._lock:
            return len(self._records)

    @property
    def num_writes(self) -> int:
        """Writes under way."""
        with self._lock:
            return sum(len(record.writes) for record in self._records.values())

    # ------------------------------------------------------------------------------ the engine's side

    def open(self, lease: Lease) -> None:
        """Start a lease, or renew it with a higher epoch. Raises InternalError for any other repetition."""
        try:
            check_compatible(self._layout, lease.layout)
        except LayoutMismatch as error:
            raise InternalError(f"lease {lease.lease_id}: {error.message}") from error
        with self._lock:
            record = self._records.get(lease.lease_id)
            if record is None:
                self._records[lease.lease_id] = _Record(lease, bytearray(len(lease.shards[0].pages)))
                return
            if record.closed or lease.epoch <= record.lease.epoch or lease.shards != record.lease.shards:
                raise InternalError(f"lease {lease.lease_id} epoch {lease.epoch} is not a renewal of what is open")
            if record.committed is not None:
                return
            record.lease = lease
            record.aborted = None
            record.states = bytearray(len(record.states))
            for number in record.landing:
                _mark(record, record.writes[number].write, WRITING)
        self._on_renewed(LeaseRenewed(lease.lease_id, lease.epoch))

    def close(self, lease_id: LeaseId, committed: bool) -> None:
        """Forget the lease; once for each open lease. Raises InternalError if it is not open, or if the engine
        believes a commit that the book did not verify.
        """
        with self._lock:
            record = self._records.get(lease_id)
            if record is None or record.closed:
                raise InternalError(f"lease {lease_id} is not open")
            if committed and record.committed is None:
                raise InternalError(f"lease {lease_id} was never committed")
            record.closed, record.unreleased = True, not committed
            released = self._settle(record)
        if released:
            self._on_released(lease_id)

    # ---------------------------------------------------------------------------- the transports' side

    def begin(self, write: PageWrite) -> WriteTicket:
        """See `Intake.begin`. Also refuses a page that another write has under way, of any epoch."""
        with self._lock:
            record = self._writable(write.lease_id, write.epoch, write.nonce)
            end = write.first + write.count
            if write.first < 0 or write.count < 0 or end > len(record.states):
                raise TransferFailed(
                    f"lease {write.lease_id}: pages {write.first}..{end - 1} are outside its {len(record.states)}"
                )
            if WRITING in record.states[write.first : end]:
                raise TransferFailed(f"lease {write.lease_id}: another write to pages {write.first}.. is under way")
            _mark(record, write, WRITING)
            self._next_ticket += 1
            pages = record.lease.shards[0].pages[write.first : end]
            ticket = WriteTicket(write, pages, self._next_ticket)
            record.writes[ticket.number] = ticket
            return ticket

    def land(self, ticket: WriteTicket) -> None:
        """See `Intake.land`. Raises InternalError when the ticket was ended before."""
        write = ticket.write
        with self._lock:
            record = self._records.get(write.lease_id)
            if record is None or ticket.number not in record.writes:
                raise InternalError(f"lease {write.lease_id}: write {ticket.number} was already ended")
            self._writable(write.lease_id, write.epoch, write.nonce)
            record.landing.add(ticket.number)

    def end(self, ticket: WriteTicket, verified: bool) -> None:
        """See `Intake.end`. Raises InternalError when the ticket was ended before."""
        lease_id = ticket.write.lease_id
        with self._lock:
            record = self._records.get(lease_id)
            if record is None or record.writes.pop(ticket.number, None) is None:
                raise InternalError(f"lease {lease_id}: write {ticket.number} was already ended")
            current = ticket.write.epoch == record.lease.epoch
            if current or ticket.number in record.landing:
                # Else the pages may be another writer's by now.
                _mark(record, ticket.write, VERIFIED if verified and current else MISSING)
            record.landing.discard(ticket.number)
            released = self._settle(record)
            touched = verified and current and not record.closed and self._touch(record)
        if released:
            self._on_released(lease_id)
        if touched:
            self._on_touched(lease_id)

    def commit(self, commit: CommitRequest) -> JobId:
        """See `Intake.commit`. `on_committed` is called once, by the first of several equal commits."""
        with self._lock:
            remembered = self._remembered.get(commit.lease_id)
            if remembered is not None:
                if not _equal(commit, remembered.commit):
                    raise TransferFailed(f"lease {commit.lease_id} was committed with other contents")
                return remembered.job
            record = self._writable(commit.lease_id, commit.epoch, commit.nonce)
            if commit.num_pages != len(record.states):
                raise TransferFailed(
                    f"lease {commit.lease_id}: commit names {commit.num_pages} pages, not {len(record.states)}"
                )
            missing = [index for index, state in enumerate(record.states) if state != VERIFIED]
            if missing:
                raise TransferFailed(
                    f"lease {commit.lease_id}: {len(missing)} of {len(record.states)} pages are not verified, "
                    f"first {missing[0]}"
                )
            record.committed = commit
            job = record.lease.job
            self._remembered[commit.lease_id] = _Remembered(commit, job)
            if len(self._remembered) > REMEMBERED_COMMITS:
                self._remembered.popitem(last=False)
        self._on_committed(
            Committed(
                job,
                commit.lease_id,
                commit.epoch,
                commit.first_token,
                commit.first_token_index,
                commit.first_logprob,
            )
        )
        return job

    def abort(self, lease_id: LeaseId, epoch: int, nonce: bytes, reason: str) -> None:
        """See `Intake.abort`. Later writes of the same epoch are refused with `reason`."""
        with self._lock:
            self._writable(lease_id, epoch, nonce).aborted = reason

    # ------------------------------------------------------------------------------------------ helpers

    def _settle(self, record: _Record) -> bool:
        """Forget a closed lease without writes; whether its release is due. Lock held."""
        if not record.closed:
            return False
        if not record.writes:
            del self._records[record.lease.lease_id]
        if record.landing or not record.unreleased:
            return False
        record.unreleased = False
        return True

    def _writable(self, lease_id: LeaseId, epoch: int, nonce: bytes) -> _Record:
        """The open record that these credentials may write to. Lock held. Raises TransferFailed."""
        record = self._records.get(lease_id)
        if record is None:
            raise TransferFailed(f"lease {lease_id} is unknown or ended")
        # A writer of another epoch has another nonce too; it is told of the epoch, below.
        if epoch == record.lease.epoch and not compare_digest(record.lease.nonce, nonce):
            raise TransferFailed(f"lease {lease_id}: wrong nonce")
        if record.closed:
            raise TransferFailed(f"lease {lease_id} ended")
        if record.committed is not None:
            raise TransferFailed(f"lease {lease_id} is committed")
        if epoch != record.lease.epoch:
            raise TransferFailed(f"lease {lease_id}: epoch {epoch}, the lease is at {record.lease.epoch}")
        if record.aborted is not None:
            raise TransferFailed(f"lease {lease_id}: its writer gave up: {record.aborted}")
        return record

    def _touch(self, record: _Record) -> bool:
        """Whether the engine should hear of it now. Lock held."""
        now_s = self._clock.now()
        if now_s - record.touched_at_s < TOUCH_INTERVAL_S:
            return False
        record.touched_at_s = now_s
        return True


def _mark(record: _Record, write: PageWrite, state: int) -> None:
    record.states[write.first : write.first + write.count] = bytes([state]) * write.count


def _equal(left: CommitRequest, right: CommitRequest) -> bool:
    if not compare_digest(left.nonce, right.nonce):
        return False
    return left == right
