"""What a router and a worker say to each other on their attached stream, as plain data.

One stream per router and worker carries all of it, both ways and in order (DESIGN.md 4). The engine's inbox
and outbox carry the same types, so nothing here knows about gRPC, torch or asyncio.

    router -> worker    Submit, Cancel, RenewLease
    worker -> router    Leased, Refused, PromptLogprobs, Tokens, Started, Ended, LoadReport

Life of a job, by stroke:

    RESERVE  (decode worker)   Submit -> Leased | Refused; then a verified commit from the prefill side
                               -> Started -> Tokens ... -> Ended
    PREFILL  (prefill worker)  Submit(lease) -> Started -> Tokens(first) -> Ended(HANDED_OVER) after the Ack, or
                               Ended(FINISHED) when the first token is the end (with or without lease)
    LOCAL    (decode worker)   Submit -> Started -> Tokens ... -> Ended; Started means that it left the queue,
                               as of PREFILL

Every Submit is answered by exactly one Refused or one Ended, whatever happens; a broken stream ends all.
Messages about a job that the receiver does not know are dropped and counted.
"""

from enum import Enum
from typing import NamedTuple

from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, WorkerId
from twostroke.cluster.core.layout import PageLayout
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import FinishReason, SamplingParams


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Stroke(Enum):
    """What a Submit asks of a worker."""

    RESERVE = "reserve"
    PREFILL = "prefill"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker tells about itself at registration and on attach. Constant for an incarnation."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    address: str
    """host:port of its gRPC server (attach and KV transfer)."""
    model: str
    layout: PageLayout
    num_pages: int
    max_context: int
    """Longest prompt plus output, in tokens, that it can hold (the lesser of the model's and the pool's)."""
    chunk_tokens: int
    """Token budget of one step."""
    transports: tuple[str, ...]
    """Names of KV transports that it speaks, best first: `collective`, `grpc`, `loopback`."""
    device: str = "cpu"
    """Identity of its device; NCCL refuses two ranks on one GPU, so equal CUDA devices use host staging."""
    weight_bytes: int = 0
    """Memory of the weights as it holds them."""


@dataclass(frozen=True, slots=True)
class LeaseShard:
    """The part of a lease that lives on one rank. Version 1 has one shard over all heads."""

    rank: int
    address: str
    head_start: int
    head_end: int
    pages: tuple[PageId, ...]
    """Decode-side pages for prompt pages `num_held`, `num_held + 1`, ... in order."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A page reservation on a decode worker, handed to the prefill worker through the router.

    A write must carry `lease_id`, `epoch` and `nonce`; renewing with `bump_epoch` makes older writers' data
    unacceptable, so that a frozen writer can never commit.
    """

    lease_id: LeaseId
    job: JobId
    epoch: int
    nonce: bytes
    worker_id: WorkerId
    incarnation: Incarnation
    layout: PageLayout
    transports: tuple[str, ...]
    device: str
    num_held: int
    """Leading prompt pages that the decode side already holds; they are not sent."""
    shards: tuple[LeaseShard, ...]
    ttl_s: float

    @property
    def num_pages(self) -> int:
        """Prompt pages in all, held ones included."""
        return self.num_held + len(self.shards[0].pages)


# --------------------------------------------------------------------------------------- router -> worker


@dataclass(frozen=True, slots=True)
class Submit:
    """Work on one attempt at one choice. Tokens to compute are `prompt + delivered`.

    `delivered` are output tokens that the client already has (a continuation); they are never sampled again
    and the next token has output index `len(delivered)`.
    """

    job: JobId
    stroke: Stroke
    prompt: tuple[int, ...]
    delivered: tuple[int, ...]
    sampling: SamplingParams
    time_left_s: float
    salt: str = ""
    adapter: str = ""
    lease: Lease | None = None
    """PREFILL only: where the pages go. None: sample one token and end, nothing is shipped."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Idempotent; unknown jobs are ignored. Answered by Ended(CANCELLED) if the job was known."""

    job: JobId


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Extend the lease of `job`; with `bump_epoch` also discard unverified pages and answer Leased again.

    When a writer's commit came first, the answer to `bump_epoch` is Started alone: the lease is over.
    """

    job: JobId
    bump_epoch: bool = False


RouterMessage = Submit | Cancel | RenewLease


# --------------------------------------------------------------------------------------- worker -> router


@dataclass(frozen=True, slots=True)
class Leased:
    job: JobId
    lease: Lease


class RefusalReason(Enum):
    NO_PAGES = "no_pages"
    """Not enough free pages now; the next load message may change that."""
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LARGE = "too_large"
    """Larger than this worker's whole pool: waiting does not help."""
    LAYOUT = "layout"
    """The two workers of the pair cannot exchange pages."""
    WRONG_ROLE = "wrong_role"
    BAD_SUBMIT = "bad_submit"
    """Our own fault, for example a token id outside the vocabulary that the edge let through."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The job was never accepted and holds nothing here."""

    job: JobId
    reason: RefusalReason
    message: str


class TokenRun(NamedTuple):
    """Consecutive output tokens of one job, the first of them at output index `first_index`.

    Made for every token of every job; a frozen dataclass takes four times as long to make (1 us).
    """

    job: JobId
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token when the job asked for them, else none."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens that one step made for one router."""

    runs: tuple[TokenRun, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens `first ...`, as far as one step computed them; all of them come before the first token."""

    job: JobId
    first: int
    """Position of the first; never 0, whose token follows nothing."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The job decodes here from now on: its commit was verified (RESERVE). Or it left the queue (LOCAL, PREFILL)."""

    job: JobId
    cached_tokens: int
    """Prompt tokens found in this worker's own prefix cache (at reserve time for RESERVE)."""
    first_token: int | None = None
    """RESERVE: the commit's, at output index `len(delivered)`. The prefill side told it too; if that was lost on its
    way, this one serves, so from here on the prefill side is needed for nothing.
    """
    first_logprob: TokenLogprob | None = None
    """Of `first_token`, if the job asked for it."""


class Outcome(Enum):
    FINISHED = "finished"
    HANDED_OVER = "handed_over"
    """Prefill side: pages verified and acknowledged, the decode side owns the request."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """A lease ran out, or the job's time did."""
    PREEMPTED = "preempted"
    """Decode side gave it back for lack of pages; the dispatcher continues it on a pair."""
    TRANSFER_FAILED = "transfer_failed"
    BROKEN_GRAMMAR = "broken_grammar"
    """Its grammar cannot be followed within the limits; no other worker would fare better."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobTimings:
    """Durations in seconds on the worker's own clock, and what it moved. Zero where not applicable."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    """First chunk launched to first token sampled."""
    transfer_busy_s: float = 0.0
    """Time in which pages of this job were being sent."""
    transfer_exposed_s: float = 0.0
    """First token sampled to Ack: the part that compute did not hide."""
    decode_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    pages_shipped: int = 0
    bytes_shipped: int = 0
    transport: str = ""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    job: JobId
    outcome: Outcome
    finish_reason: FinishReason | None = None
    """Set when FINISHED."""
    num_output: int = 0
    """Output tokens in all, delivered ones included; the dispatcher checks it against what it received."""
    message: str = ""
    timings: JobTimings = JobTimings()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a worker's pages are; each in exactly one (DESIGN.md 5)."""

    free: int
    cached: int
    active: int
    leased: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.active + self.leased + self.quarantined

    @property
    def at_rest(self) -> bool:
        return self.active == self.leased == self.quarantined == 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Sent at least every 500 ms and after every change that may wake a waiting request."""

    ledger: Ledger
    running: int
    """Jobs that take part in steps."""
    waiting: int
    """Accepted jobs that do not yet."""
    leases: int
    queued_tokens: int
    """Prompt tokens accepted and not yet computed."""
    step_age_s: float
    """Seconds since the last step ended; running > 0 and a large age means stalled."""
    num_steps: int
    event_sequence: int
    """Last prefix event published by this incarnation."""
    draining: bool
    generated_tokens: int = 0
    """Output tokens sampled in this life; flat when nothing runs."""


@dataclass(frozen=True, slots=True)
class WorkerCheck:
    """A worker's books, read between two steps; not part of the attached stream."""

    load: LoadReport
    fault: str
    """What does not add up; empty when everything does."""
    transfers: int
    """Shipments, or leases known to the transports, that have not ended."""

    @property
    def at_rest(self) -> bool:
        """Nothing is held for anybody, and all adds up."""
        load = self.load
        return (
            not self.fault
            and load.ledger.at_rest
            and load.running == load.waiting == load.leases == self.transfers == 0
        )


WorkerMessage = Leased | Refused | PromptLogprobs | Tokens | Started | Ended | LoadReport
