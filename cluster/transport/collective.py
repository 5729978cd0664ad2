"""Pages by torch.distributed, point to point: the sending half. Control goes over gRPC (`KvCollective`).

Life of a pair (one decode incarnation; at most `max_groups`):

    1. first open   Join on a stream, then both sides build the group. A failure is remembered for REJOIN_S, so that
                    shipments take the next transport at once instead of waiting for the same failure
    2. push         each offer, in the order of the pair's FIFO: pages copied to staging, Offer -> Ready, the bytes,
                    Done -> Received. A refused offer ends its shipment only
    3. broken       an operation over its time or a broken stream: everyone in the FIFO fails, the group is gone, the
                    next open makes a new generation
    4. closed       unused for `idle_group_s`, its worker lives another life, or `close`

The pair itself is in `collective_pair`, torch in `collective_group`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import OnAccepted, TransferStats, unheard
from twostroke.cluster.transport.collective_group import PairThread, device_pages
from twostroke.cluster.transport.collective_pair import SLOTS, Key, Pair, Sender
from twostroke.cluster.transport.control import commit_to_wire, send_abort, send_commit

log = structlog.get_logger(__name__)

REJOIN_S = 30.0
REMEMBERED_FAILURES = 256
CLOSE_S = 2.0


class CollectiveTransport:
    """Implements `base.Transport`."""

    name = "collective"

    def __init__(
        self,
        memory: PageMemory,
        incarnation: Incarnation,
        *,
        host: str,
        device: str = "cpu",
        offer_bytes: int = 16 << 20,
        operation_timeout_s: float = 10.0,
        idle_group_s: float = 300.0,
        max_groups: int = 16,
    ) -> None:
        """`host` is our own, where gloo listens; `device` as in WorkerInfo."""
        self.sender = Sender(
            memory,
            incarnation,
            host,
            device if device_pages(memory) is not None else "cpu",
            max(1, offer_bytes // memory.layout.page_bytes),
            operation_timeout_s,
            idle_group_s,
            TaskOwner("collective"),
        )
        self._max_groups = max_groups
        self._unclosed: set[Pair] = set()
        """Pairs with an open channel, broken ones too."""
        self._pairs: dict[Key, Pair] = {}
        self._failures: dict[Key, tuple[float, str]] = {}
        self._threads: set[PairThread] = set()

    @property
    def num_groups(self) -> int:
        return len(self._pairs)

    async def open(self, lease: Lease, on_accepted: OnAccepted = unheard) -> "CollectiveShipment":
        check_compatible(self.sender.memory.layout, lease.layout)
        key = (lease.shards[0].address, lease.incarnation)
        pair = self._pairs.get(key)
        if pair is None or pair.broken:
            pair = self._new_pair(key)
        pair.acquire()
        try:
            await pair.join(lease)
        except BaseException:
            pair.release()
            raise
        # Only now: a late lease of a life that is over must not end the pair with the present one.
        for (address, incarnation), other in list(self._pairs.items()):
            if address == key[0] and incarnation != key[1]:
                other.break_up("another life of the worker began")
        return CollectiveShipment(self.sender, lease, pair, on_accepted)

    def _new_pair(self, key: Key) -> Pair:
        failed_at_s, reason = self._failures.get(key, (float("-inf"), ""))
        if time.monotonic() - failed_at_s < REJOIN_S:
            raise TransferFailed(reason)
        if len(self._pairs) >= self._max_groups:
            raise TransferFailed(f"{len(self._pairs)} groups already, as many as max_groups allows")
        pair = self._pairs[key] = Pair(self.sender, self, key)
        self._unclosed.add(pair)
        self._threads = {thread for thread in self._threads if thread.alive} | {pair.thread}
        return pair

    def not_joined(self, key: Key, reason: str) -> None:
        self._failures[key] = (time.monotonic(), reason)
        if len(self._failures) > REMEMBERED_FAILURES:
            del self._failures[next(iter(self._failures))]

    def forget(self, key: Key, pair: Pair) -> None:
        if self._pairs.get(key) is pair:
            del self._pairs[key]

    def channel_closed(self, pair: Pair) -> None:
        self._unclosed.discard(pair)

    async def close(self) -> None:
        for pair in list(self._pairs.values()):
            pair.break_up("the worker stops")
        for pair in list(self._unclosed):
            await pair.close_channel()
        await self.sender.tasks.close()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if not await thread.wait_ended(max(0.0, deadline_s - time.monotonic())):
                log.warning("group_still_waits", reason="its peer is frozen; the thread ends with its operation")


class CollectiveShipment:
    """Implements `base.Shipment`."""

    def __init__(self, sender: Sender, lease: Lease, pair: Pair, on_accepted: OnAccepted) -> None:
        """The pair is acquired for us."""
        self._sender = sender
        self._lease = lease
        self._pair = pair
        self._on_accepted = on_accepted
        self._num_pages = 0
        self._busy_s = 0.0
        self._over = False
        self._told = False
        """The other side knows, or has been told, that nothing more comes."""

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        self._check_live()
        at_once = self._sender.pages_per_offer
        started_s = time.monotonic()
        running: deque[asyncio.Task[None]] = deque()
        try:
            for start in range(0, len(pages), at_once):
                if len(running) == SLOTS:
                    await running[0]
                    running.popleft()
                    self._on_accepted()
                ship = self._pair.ship(self._lease, first + start, pages[start : start + at_once])
                running.append(asyncio.create_task(ship, name="collective.push"))
            for task in running:
                await task
                self._on_accepted()
        except TransferFailed:
            self._end()
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            running.clear()
            self._busy_s += time.monotonic() - started_s
        self._num_pages += len(pages)

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        self._check_live()
        try:
            commit = commit_to_wire(self._lease, first_token, first_token_index, first_logprob)
            await send_commit(self._pair.stub, self._lease, commit, self._sender.timeout_s)
        finally:
            self._told = True
            self._end()
        num_bytes = self._num_pages * self._sender.memory.layout.page_bytes
        return TransferStats("collective", self._num_pages, num_bytes, self._busy_s)

    async def abort(self, reason: str) -> None:
        if self._told or self._pair.channel_closed:
            self._end()
            return
        self._told = True
        self._pair.acquire()
        self._end()
        try:
            await send_abort(self._pair.stub, self._lease, reason)
        finally:
            self._pair.release()

    def _check_live(self) -> None:
        if self._over:
            raise TransferFailed(f"lease {self._lease.lease_id}: the shipment is over")

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._pair.release()
