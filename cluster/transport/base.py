"""KV page transports: how pages travel from a prefill worker to the leased pages of a decode worker.

    prefill side                                   decode side
    Transport.open(lease) -> Shipment              Intake (the lease book; owned by the decode worker)
    Shipment.push(first, pages)  ----- data ---->  intake.begin(write) -> pages; received into a buffer;
    on_accepted()                                  intake.land(ticket); memory.write; intake.end(ticket)
    Shipment.commit(token) ----------- commit -->  intake.commit(...)  -> Ack, or TransferFailed
    Shipment.abort(reason) ----------- abort --->  intake.abort(lease, epoch)

The sender owns its copy until `commit` returns (Ack) or any call raises; it may then free its pages. That holds for
cancellation too: when a call of a Shipment is cancelled, the transport has let go of the pages by the time the
cancellation comes out of it. The
receiver checks lease, nonce, epoch, layout, ranges, count and checksums before the engine may read a page.
Nothing here touches torch or the engine: memory is `core.layout.PageMemory`.

Implementations: `loopback` (fake, same process), `grpc` (any network), `collective` (torch.distributed).
All pass one contract suite, `tests/component/transport/test_contract.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.cluster.core.ids import JobId, LeaseId, PageId
from twostroke.cluster.core.layout import PageLayout
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease

COMMIT_TIMEOUT_S = 30.0
"""A commit without an answer is given up after this."""

OnAccepted = Callable[[], None]
"""The other side has taken some of the pages of a push: the shipment gets on."""


def unheard() -> None:
    """For who does not care whether a shipment gets on."""


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Announces pages `first .. first + count - 1` of the lease (positions among `lease.shards[0].pages`)."""

    lease_id: LeaseId
    epoch: int
    nonce: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WriteTicket:
    """A write under way. Once it lands, its pages are neither read nor freed before `Intake.end(ticket)`."""

    write: PageWrite
    pages: tuple[PageId, ...]
    number: int


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """The transfer's final message. `num_pages` counts the lease's pages (`len(shards[0].pages)`)."""

    lease_id: LeaseId
    epoch: int
    nonce: bytes
    num_pages: int
    first_token: int
    first_token_index: int
    first_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one shipment moved."""

    transport: str
    pages: int
    bytes: int
    busy_s: float


class Intake(Protocol):
    """The decode worker's lease book as transports see it. Thread-safe; no call blocks.

    Implemented by `decode_worker.intake.LeaseBook`; the same class serves the contract suite.
    Each method raises TransferFailed, naming the difference, when the lease is unknown, ended, of another
    epoch or nonce, or when the range is outside the lease.
    """

    @property
    def layout(self) -> PageLayout: ...

    def begin(self, write: PageWrite) -> WriteTicket:
        """Claim the target pages. Every `begin` is followed by exactly one `end`, whatever happens between."""
        ...

    def land(self, ticket: WriteTicket) -> None:
        """All bytes are here, in memory of our own: from now to `end` they may be written to the ticket's pages.

        Raises TransferFailed when the lease ended or was renewed since `begin`: then nothing may be written. So a
        writer that froze in the middle of its bytes holds up neither the next writer nor the end of the lease.
        """
        ...

    def end(self, ticket: WriteTicket, verified: bool) -> None:
        """The bytes are in place and their checksum matched (`verified`), or the write was given up.

        Legal after the lease ended: then it releases the quarantined pages.
        """
        ...

    def commit(self, commit: CommitRequest) -> JobId:
        """All pages verified: hand the job to the engine. Idempotent for an equal commit."""
        ...

    def abort(self, lease_id: LeaseId, epoch: int, nonce: bytes, reason: str) -> None:
        """The sender gave up. The lease lives on (the dispatcher may renew it for another prefill worker)."""
        ...


class Shipment(Protocol):
    """One job's transfer. Used by one task; calls do not overlap. Any TransferFailed ends it."""

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        """Send local `pages` as positions `first ...` of the lease; returns when the bytes left our pool or
        are safely copied. Zero pages are legal. Raises TransferFailed.
        """
        ...

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        """Send the final commit and wait for the Ack. Raises TransferFailed after COMMIT_TIMEOUT_S at most."""
        ...

    async def abort(self, reason: str) -> None:
        """Idempotent; never raises; tells the other side when it can."""
        ...


class Transport(Protocol):
    """The sending half, one per prefill worker and transport name."""

    @property
    def name(self) -> str: ...

    async def open(self, lease: Lease, on_accepted: OnAccepted = unheard) -> Shipment:
        """Connect (or reuse) the pair and agree on the layout. Raises LayoutMismatch or TransferFailed.

        `on_accepted` is called on the event loop for each part of a push that the other side has taken: what shares
        its pair with many others takes long, and is told from what does not get on at all.
        """
        ...

    async def close(self) -> None:
        """End all shipments and connections. Idempotent."""
        ...
