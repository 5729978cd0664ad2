"""Sending a prefill's pages while it computes. One task a shipment; a shipment is one (lease, epoch).

    1. PagesReady (first)   the task starts and opens a shipment: the first transport that both sides speak and that
                            can make the pair; a transport that cannot is logged, counted, and the next one tried
    2. PagesReady ...       whatever is ready is pushed at once, so that transfer overlaps the next chunk's compute
       ShipmentTouched      the other side took some of it: the engine holds the pages for longer
    3. PrefillDone          once all is pushed: commit, wait for the Ack
       ShipmentDropped      stop, whatever the task is doing, and abort
    4. ShipmentEnded        exactly one, when the task reads no page any more

The engine may announce pages of a shipment that has just failed, because its word and ours cross. Such late
events are known by their (lease, epoch), of which the last `REMEMBERED` ended ones are kept.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import JobId, LeaseId, PageId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.cluster.transport.base import OnAccepted, Shipment, TransferStats, Transport
from twostroke.engine.commands import PagesReady, PrefillDone, ShipmentDropped, ShipmentEnded, ShipmentTouched

log = structlog.get_logger(__name__)

REMEMBERED = 4096
TOUCH_INTERVAL_S = 0.5
"""The engine's inbox hears of one accepted part a shipment in this time."""


class Shipping:
    """Owns the shipments of one prefill worker. All methods on the event loop.

    `post` hands a command to the engine. `transports` are in order of preference.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        post: Callable[[ShipmentTouched | ShipmentEnded], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._transports = tuple(transports)
        self._post = post
        self._metrics = metrics
        self._open: dict[JobId, _Outgoing] = {}
        self._ended: OrderedDict[tuple[LeaseId, int], None] = OrderedDict()
        self._tasks = TaskOwner("shipping")

    @property
    def num_open(self) -> int:
        return len(self._open)

    def on_event(self, event: PagesReady | PrefillDone | ShipmentDropped) -> None:
        if isinstance(event, ShipmentDropped):
            outgoing = self._open.get(event.job)
            if outgoing is not None:
                outgoing.drop(event.reason)
            return
        outgoing = self._outgoing(event.job, event.lease)
        if outgoing is None:
            return
        if isinstance(event, PagesReady):
            outgoing.ready(event.first, event.pages)
        else:
            outgoing.done(event.first_token, event.first_token_index, event.first_logprob)

    def _outgoing(self, job: JobId, lease: Lease) -> "_Outgoing | None":
        """The shipment of this lease and epoch, started if it is new; None if it has ended."""
        if (lease.lease_id, lease.epoch) in self._ended:
            return None
        outgoing = self._open.get(job)
        if outgoing is None:
            outgoing = _Outgoing(lease)
            self._open[job] = outgoing
            outgoing.task = self._tasks.spawn(self._ship(job, outgoing), str(job))
        return outgoing

    async def _ship(self, job: JobId, outgoing: "_Outgoing") -> None:
        shipment: Shipment | None = None
        stats: TransferStats | None = None
        error = "the worker stops"
        try:
            if outgoing.begin():
                shipment = await self._open_shipment(outgoing.lease, partial(self._touch, job, outgoing))
                stats = await outgoing.run(shipment)
                error = ""
            else:
                error = self._dropped(outgoing)
        except (TransferFailed, LayoutMismatch) as failure:
            error = failure.message
            self._metrics.transfer_failures.of(failure.code).inc()
            log.warning("transfer_failed", job=str(job), lease=outgoing.lease.lease_id, error=error)
        except asyncio.CancelledError:
            # Dropped: there is an abort and an answer to send. If the owner closes, go down after them.
            if not outgoing.dropped:
                raise
            error = self._dropped(outgoing)
        finally:
            # Before the abort, which may take its time: a late event must neither stop it nor start anything new.
            outgoing.interruptible = False
            self._remember(outgoing.lease)
            try:
                if shipment is not None and stats is None:
                    await shipment.abort(error)
            finally:
                self._finish(job, error, stats)

    def _dropped(self, outgoing: "_Outgoing") -> str:
        self._metrics.transfer_failures.of("dropped").inc()
        return outgoing.dropped

    def _touch(self, job: JobId, outgoing: "_Outgoing") -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - outgoing.touched_at_s >= TOUCH_INTERVAL_S:
            outgoing.touched_at_s = now_s
            self._post(ShipmentTouched(job))

    async def _open_shipment(self, lease: Lease, on_accepted: OnAccepted) -> Shipment:
        """Raises LayoutMismatch, or TransferFailed with every transport's reason."""
        reasons: list[str] = []
        for transport in self._transports:
            if transport.name not in lease.transports:
                continue
            try:
                return await transport.open(lease, on_accepted)
            except TransferFailed as failure:
                reasons.append(f"{transport.name}: {failure.message}")
                self._metrics.transfer_failures.of(f"open_{transport.name}").inc()
                log.warning("pair_failed", transport=transport.name, worker=lease.worker_id, error=failure.message)
        if not reasons:
            ours = [transport.name for transport in self._transports]
            raise TransferFailed(f"no transport in common: ours {ours}, theirs {list(lease.transports)}")
        raise TransferFailed("; ".join(reasons))

    def _remember(self, lease: Lease) -> None:
        self._ended[lease.lease_id, lease.epoch] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _finish(self, job: JobId, error: str, stats: TransferStats | None) -> None:
        if self._open.pop(job, None) is None:
            return
        if stats is None:
            self._post(ShipmentEnded(job, error or "the transfer failed", 0, 0, 0.0, ""))
        else:
            self._post(ShipmentEnded(job, "", stats.pages, stats.bytes, stats.busy_s, stats.transport))

    async def close(self) -> None:
        """End all shipments, each with its ShipmentEnded. The transports are the caller's to close."""
        await self._tasks.close()
        # A task that was cancelled before its first step never ran, so it could not answer.
        for job in list(self._open):
            self._finish(job, "the worker stops", None)


class _Outgoing:
    """What is known of one shipment, and the loop that sends it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.dropped = ""
        self.interruptible = False
        """The task may be cancelled: it has begun, and it is not yet on its way out."""
        self.task: asyncio.Task[object] | None = None
        self.touched_at_s = float("-inf")
        self._first = 0
        """Position in the lease of the first page that waits to be pushed."""
        self._pages: list[PageId] = []
        self._token: tuple[int, int, TokenLogprob | None] | None = None
        self._wake = asyncio.Event()

    def ready(self, first: int, pages: Sequence[PageId]) -> None:
        assert first == self._first + len(self._pages), f"pages from {first} do not follow {self._first}"
        self._pages.extend(pages)
        self._wake.set()

    def done(self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None) -> None:
        self._token = (first_token, first_token_index, first_logprob)
        self._wake.set()

    def begin(self) -> bool:
        """The task's first act. False when it was dropped before."""
        self.interruptible = not self.dropped
        return self.interruptible

    def drop(self, reason: str) -> None:
        """Idempotent. A task that has not begun is not cancelled, because then it would never answer."""
        if self.dropped:
            return
        self.dropped = reason or "dropped"
        if self.interruptible and self.task is not None:
            self.task.cancel()

    async def run(self, shipment: Shipment) -> TransferStats:
        """Until the Ack. Its waits are bounded by the engine, which drops what does not get on for `hold_s`."""
        while True:
            if self._pages:
                first, pages = self._first, self._pages
                self._first, self._pages = first + len(pages), []
                await shipment.push(first, pages)
            elif self._token is not None:
                return await shipment.commit(*self._token)
            else:
                self._wake.clear()
                await self._wake.wait()
