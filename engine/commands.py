"""What goes into the engine thread and what comes out, as plain data.

    commands (inbox)                              events (outbox)
    FromRouter, RouterGone, Drain,                ToRouter, Published,
    Snapshot, Check                               SnapshotTaken, Checked
    prefill: ShipmentTouched, ShipmentEnded       prefill: PagesReady, PrefillDone, ShipmentDropped
    decode:  Committed, LeaseRenewed,             decode:  LeaseOpened, LeaseClosed
             LeaseTouched, PagesReleased

The engine thread alone owns the allocator, jobs and leases. Anyone may post commands; events are handed to
one callback on the engine thread, in order.

Page hand-over on the prefill side: from `PagesReady` on, the shipping task may read the job's pages; they stay
referenced until `ShipmentEnded` arrives for the job, also when the job was cancelled meanwhile
(`ShipmentDropped` asks the task to stop, and it still answers with exactly one `ShipmentEnded`).

Lease end on the decode side: an uncommitted lease that ends moves its pages to quarantine and emits
`LeaseClosed`; the lease book answers with `PagesReleased` once no bytes land in them, and only then are they free.
"""

from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease, LoadReport, RouterMessage, WorkerMessage
from twostroke.cluster.core.records import dataclass
from twostroke.engine.plan import Constraint

# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class FromRouter:
    router: Incarnation
    message: RouterMessage
    constraint: Constraint | None = None
    """Of a Submit with a grammar: the grammar compiled (`engine.grammar_desk`)."""


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The router's stream broke: everything held for it is freed at once."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new work from now on; what was accepted is finished."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answered by `SnapshotTaken` with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class Check:
    """Answered by the loop itself with `Checked` of the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class ShipmentTouched:
    """The other side took some of the job's pages: a finished prefill keeps them for another `hold_s`."""

    job: JobId


@dataclass(frozen=True, slots=True)
class ShipmentEnded:
    """The shipping task of `job` reads no page any more. `error` is empty when the Ack came."""

    job: JobId
    error: str
    pages: int
    bytes: int
    busy_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The lease book verified the whole transfer; the job may decode from `first_token` on.

    It stands even when a renewal has raised the lease's epoch meanwhile: the book decides which came first, the
    writer has its Ack, and there is no `LeaseRenewed`. Dropped only when the lease has ended.
    """

    job: JobId
    lease_id: LeaseId
    epoch: int
    first_token: int
    first_token_index: int
    first_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The lease book took the renewal: older writers are refused, and the new one may be told."""

    lease_id: LeaseId
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseTouched:
    """A chunk was accepted: the lease lives for another TTL."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class PagesReleased:
    """No bytes land in the closed lease's pages any more: quarantine ends."""

    lease_id: LeaseId


Command = (
    FromRouter
    | RouterGone
    | Drain
    | Snapshot
    | Check
    | ShipmentTouched
    | ShipmentEnded
    | Committed
    | LeaseRenewed
    | LeaseTouched
    | PagesReleased
)

# -------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ToRouter:
    router: Incarnation
    messages: tuple[WorkerMessage, ...]


@dataclass(frozen=True, slots=True)
class Published:
    batch: PrefixBatch


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    number: int
    snapshot: PrefixSnapshot


@dataclass(frozen=True, slots=True)
class Checked:
    """`fault` is what `check_integrity` found wrong, empty when all adds up; `load` is of the same instant."""

    number: int
    load: LoadReport
    fault: str


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Pages `first ...` of the lease (positions past `num_held`) are computed and may be sent."""

    job: JobId
    lease: Lease
    first: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """All pages were announced; commit with this token."""

    job: JobId
    lease: Lease
    first_token: int
    first_token_index: int
    first_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ShipmentDropped:
    """Stop sending (cancelled, expired, ended by its first token, or the router is gone)."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseOpened:
    """Also emitted again, with a higher epoch, by a renewal that bumps it: the lease book answers `LeaseRenewed`,
    unless a commit came first.
    """

    lease: Lease


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """`committed`: its pages belong to the job now. Otherwise they are quarantined until `PagesReleased`."""

    lease_id: LeaseId
    committed: bool


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The engine's first event: a real step has run, jobs can be computed."""


Event = (
    WarmedUp
    | ToRouter
    | Published
    | SnapshotTaken
    | Checked
    | PagesReady
    | PrefillDone
    | ShipmentDropped
    | LeaseOpened
    | LeaseClosed
)
