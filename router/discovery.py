"""How a router finds its workers, and keeps its index in step with them.

    find     every POLL_S: read the registry; attach to incarnations that are new, detach those whose entry is gone
             and that say they drain (an expired entry alone is no reason: the link itself tells who lives)
    prove    a prefill worker waits for a decode worker to be attached and is attached itself once it has shipped a
             page there (`router.self_test`): who is attached can serve
    follow   every READ_S: read each worker's prefix batches after the last one known, fold them into the index
    heal     fetch the snapshots that the index asks for, a few at once

Losing the store changes nothing for what is attached: links stay, placement goes on from memory (invariant 20), and
the index is healed by snapshots alone. A worker that cannot be reached is tried again after RETRY_S, for as long as it
is registered.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import Overloaded, TwostrokeError, Unavailable
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.state.base import EventLog, Registry
from twostroke.router.dispatcher import Dispatcher
from twostroke.router.policy import mismatch

log = structlog.get_logger(__name__)

POLL_S = 0.5
READ_S = 0.1
RETRY_S = 2.0
CONNECT_TIMEOUT_S = 10.0
SNAPSHOT_TIMEOUT_S = 10.0
STORE_RETRY_S = 1.0

Connect = Callable[[WorkerInfo], Awaitable[WorkerLink]]
"""Attach to the worker at `info.address`, with the dispatcher as listener; see `cluster.attach.connect`."""
Prove = Callable[[WorkerInfo, WorkerInfo], Awaitable[None]]
"""See `router.self_test.ship_once`: (prefill worker, decode worker)."""
FetchSnapshot = Callable[[WorkerInfo], Awaitable[PrefixSnapshot]]


class Discovery:
    """Owns the tasks of one router that look for workers. `start` once, `close` once."""

    def __init__(
        self,
        registry: Registry,
        events: EventLog,
        dispatcher: Dispatcher,
        connect: Connect,
        prove: Prove,
        fetch_snapshot: FetchSnapshot,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self._registry = registry
        self._events = events
        self._dispatcher = dispatcher
        self._connect = connect
        self._prove = prove
        self._fetch_snapshot = fetch_snapshot
        self._clock = clock or SystemClock()
        self._random = random or Random()
        self._tasks = TaskOwner("discovery")
        self._attaching: set[Incarnation] = set()
        self._not_before: dict[Incarnation, float] = {}
        self._store_lost = False

    def start(self) -> None:
        self._tasks.spawn(self._forever(self.find, POLL_S), "find")
        self._tasks.spawn(self._forever(self.follow, READ_S), "follow")
        self._tasks.spawn(self._heal_forever(), "heal")

    async def close(self) -> None:
        await self._tasks.close()

    async def _forever(self, step: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            try:
                await step()
                self._note_store(lost=False)
                await asyncio.sleep(pause_s)
            except Unavailable as error:
                self._note_store(lost=True, reason=error.message)
                await asyncio.sleep(STORE_RETRY_S)

    def _note_store(self, *, lost: bool, reason: str = "") -> None:
        if lost and not self._store_lost:
            log.warning("state_store_lost", reason=reason)
        elif self._store_lost and not lost:
            log.info("state_store_back")
        self._store_lost = lost

    # ---------------------------------------------------------------------------------------------- workers

    async def find(self) -> None:
        """One look at the registry. Raises Unavailable."""
        registered = {info.incarnation: info for info in await self._registry.workers()}
        now = self._clock.now()
        self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        for info in registered.values():
            known = self._dispatcher.fleet.find(info.incarnation) is not None or info.incarnation in self._attaching
            partnerless = info.role is Role.PREFILL and not self._dispatcher.fleet.workers(Role.DECODE)
            if not known and not partnerless and info.incarnation not in self._not_before:
                self._attaching.add(info.incarnation)
                self._tasks.spawn(self._attach(info), f"attach-{info.worker_id}")
        for worker in self._dispatcher.fleet.workers():
            gone = worker.info.incarnation not in registered
            if gone and worker.draining and not worker.charges:
                self._dispatcher.detach(worker.info.incarnation, "it has drained and left")

    async def _attach(self, info: WorkerInfo) -> None:
        # Not again at once: also a link that breaks, or a worker that is found frozen, gets a pause.
        self._not_before[info.incarnation] = self._clock.now() + RETRY_S
        try:
            await self._prove_shipping(info)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                link = await self._connect(info)
            if link.info.incarnation != info.incarnation:
                link.close("another life of the worker answers at this address")
            elif self._dispatcher.attach(link):
                log.info("worker_attached", worker=info.worker_id, role=info.role.value, incarnation=info.incarnation)
        except (TwostrokeError, TimeoutError) as error:
            log.warning("attach_failed", worker=info.worker_id, address=info.address, error=str(error))
        finally:
            self._attaching.discard(info.incarnation)

    async def _prove_shipping(self, info: WorkerInfo) -> None:
        """Raises TwostrokeError when a prefill worker cannot ship to a decode worker, drawn among the attached."""
        if info.role is not Role.PREFILL:
            return
        decode = self._dispatcher.fleet.workers(Role.DECODE)
        usable = [worker.info for worker in decode if not worker.draining and not worker.stalled]
        if not usable:
            raise Unavailable("no decode worker can receive pages now")
        partners = [other for other in usable if mismatch(info, other) is None]
        if not partners:
            return  # nothing will be placed on it; why is said where a request waits
        partner = self._random.choice(partners)
        started = self._clock.now()
        try:
            await self._prove(info, partner)
        except Overloaded as error:
            # More prefill capacity must not wait for the decode side to have time for a test.
            log.warning("self_test_postponed", prefill=info.worker_id, decode=partner.worker_id, reason=error.message)
            return
        took_ms = round(1e3 * (self._clock.now() - started), 1)
        log.info("self_test_passed", prefill=info.worker_id, decode=partner.worker_id, took_ms=took_ms)

    # ------------------------------------------------------------------------------------------------ index

    async def follow(self) -> None:
        """One read of the event log. Raises Unavailable."""
        for batch in await self._events.read(self._dispatcher.index.cursors()):
            self._dispatcher.index.apply(batch)

    async def _heal_forever(self) -> None:
        while True:
            for incarnation in self._dispatcher.index.due(self._clock.now()):
                self._tasks.spawn(self._heal(incarnation), f"snapshot-{incarnation}")
            await asyncio.sleep(READ_S)

    async def _heal(self, incarnation: Incarnation) -> None:
        worker = self._dispatcher.fleet.find(incarnation)
        if worker is None:
            return
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                snapshot = await self._fetch_snapshot(worker.info)
        except (TwostrokeError, TimeoutError) as error:
            log.warning("snapshot_failed", worker=worker.info.worker_id, error=str(error))
            self._dispatcher.index.snapshot_failed(incarnation)
            return
        if snapshot.incarnation != incarnation:
            # Another life answers at the address; this one's link is about to break.
            self._dispatcher.index.snapshot_failed(incarnation)
            return
        self._dispatcher.index.apply_snapshot(snapshot)
