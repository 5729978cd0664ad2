"""The supervisor's loop: look, decide (`supervisor.reconcile`), act; independent of Ray.

    every TICK_S: ask each host for its view -> reconcile -> start, drain or forget hosts
    every SIZES_S: desired sizes from the store; while it is away, or has forgotten, the last value holds
    a new life of the supervisor: `adopt` first; what it finds is what is wanted, until the store says otherwise
    shutdown: routers drain first, then workers, then the state server

`Hosts` is the seam: `control.ray_app` implements it with actors; `LocalHosts`, below, within one process.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from twostroke.cluster.control.child import ChildKeeper, ChildSpec, ChildView
from twostroke.cluster.control.supervisor import (
    STAYING,
    Action,
    Drain,
    Forget,
    Member,
    MemberRole,
    MemberState,
    Start,
    reconcile,
    settled,
)
from twostroke.cluster.core.errors import InvalidRequest, TwostrokeError, Unavailable
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.state.base import DesiredSizes, PoolSizes

log = structlog.get_logger(__name__)

TICK_S = 0.5
SIZES_S = 1.0
SHUTDOWN_ORDER = ((MemberRole.ROUTER,), (MemberRole.PREFILL, MemberRole.DECODE), (MemberRole.STATE,))


class HostLost(TwostrokeError):
    """The host of a child has died; the child drains by itself."""

    code = "host_lost"
    retryable = True


class Hosts(Protocol):
    async def existing(self) -> list[ChildView]:
        """All hosts of an earlier life of the supervisor; one that does not answer now is STARTING."""
        ...

    async def start(self, worker_id: WorkerId, role: MemberRole, order: int) -> None:
        """Raises Unavailable when it cannot be started now."""
        ...

    async def view(self, worker_id: WorkerId) -> ChildView:
        """Raises HostLost."""
        ...

    async def drain(self, worker_id: WorkerId) -> None:
        """Begin to stop the child; returns at once. Raises HostLost."""
        ...

    async def forget(self, worker_id: WorkerId) -> None:
        """End the host. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class FleetStatus:
    desired: dict[MemberRole, int]
    views: tuple[ChildView, ...]
    settled: bool
    """Exactly the wanted processes are there and all are ready."""


class Fleet:
    """Use on one event loop. `run` is its only background work; the caller owns that task."""

    def __init__(self, hosts: Hosts, sizes: DesiredSizes, *, routers: int, embedded_state: bool) -> None:
        self._hosts = hosts
        self._store = sizes
        self._routers = routers
        self._embedded_state = embedded_state
        self._sizes = PoolSizes(0, 0)
        self._unsaved = False
        self._off: set[MemberRole] = set()
        self._views: dict[WorkerId, ChildView] = {}
        self._lost: dict[WorkerId, ChildView] = {}
        """Last view of those whose host died: their successor's restarts and last end go on from it."""
        self._order = 0
        self._lock = asyncio.Lock()

    # ---------------------------------------------------------------------------------------- commands

    async def scale(self, sizes: PoolSizes) -> None:
        """Takes effect from the next tick on, and tries again what had failed for good."""
        if sizes.prefill < 0 or sizes.decode < 0:
            raise InvalidRequest("pool sizes are 0 or more")
        async with self._lock:
            self._sizes, self._unsaved = sizes, True
            failed = [view.worker_id for view in self._views.values() if view.state is MemberState.FAILED]
            for worker_id in failed:
                await self._hosts.forget(worker_id)
                del self._views[worker_id]

    async def drain(self, worker_id: WorkerId) -> None:
        """Take this process out: it finishes what it has and leaves; its pool's desired size falls by one."""
        async with self._lock:
            view = self._views.get(worker_id)
            if view is None:
                raise InvalidRequest(f"no worker {worker_id!r}; there are: {', '.join(sorted(self._views))}")
            if view.state in (MemberState.DRAINING, MemberState.STOPPED):
                return
            role = MemberRole(view.role)
            if role is MemberRole.STATE:
                raise InvalidRequest("the state server serves all others; `twostroke down` stops it")
            await self._hosts.drain(worker_id)
            self._views[worker_id] = replace(view, state=MemberState.DRAINING)
            if role is MemberRole.ROUTER:
                self._routers -= 1
                return
            fewer = {role.value: getattr(self._sizes, role.value) - 1}
            self._sizes, self._unsaved = replace(self._sizes, **fewer), True

    async def shutdown(self, timeout_s: float) -> bool:
        """Drain everything, in order; True when nothing is left. `timeout_s` bounds each of the three stages."""
        loop = asyncio.get_running_loop()
        for roles in SHUTDOWN_ORDER:
            self._off.update(roles)
            deadline = loop.time() + timeout_s
            while any(MemberRole(view.role) in roles for view in self._views.values()):
                if loop.time() > deadline:
                    return False
                await self.tick()
                await asyncio.sleep(TICK_S / 5)
        return True

    def status(self) -> FleetStatus:
        desired = self._desired()
        order = list(MemberRole)
        told = [self._with_history(view) for view in self._views.values()]
        views = sorted(told, key=lambda view: (order.index(MemberRole(view.role)), view.worker_id))
        return FleetStatus(desired, tuple(views), settled(desired, self._members()))

    def _with_history(self, view: ChildView) -> ChildView:
        before = self._lost.get(view.worker_id)
        if before is None:
            return view
        return replace(view, restarts=view.restarts + before.restarts + 1, last_end=view.last_end or before.last_end)

    # -------------------------------------------------------------------------------------------- loop

    async def adopt(self) -> None:
        """Take over the hosts of an earlier life, and the sizes from the store; before `run` and any command.

        With the store away the sizes are those of the pools found: a size that is not known drains nobody.
        """
        async with self._lock:
            for view in await self._hosts.existing():
                self._views[view.worker_id] = view
                self._order = max(self._order, view.order)
            staying = Counter(view.role for view in self._views.values() if view.state in STAYING)
            self._sizes = PoolSizes(staying[MemberRole.PREFILL.value], staying[MemberRole.DECODE.value])
        if self._views and self._state_ready():
            await self.sync_sizes()

    async def run(self) -> None:
        """Reconcile until cancelled. A failure of either loop ends both."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_sizes())
            while True:
                await self.tick()
                await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        async with self._lock:
            await self._look()
            for action in reconcile(self._desired(), self._members()):
                try:
                    await self._act(action)
                except (HostLost, Unavailable) as error:
                    log.warning("action_failed", action=repr(action), reason=error.message)  # the next tick retries

    async def sync_sizes(self) -> None:
        """Exchange sizes with the store once; keeps the last value when the store is away."""
        try:
            if self._unsaved:
                await self._save_sizes()
            else:
                await self._load_sizes()
        except Unavailable as error:
            log.warning("sizes_unavailable", reason=error.message, kept=repr(self._sizes))

    async def _save_sizes(self) -> None:
        sent = self._sizes
        await self._store.set(sent)
        self._unsaved = self._sizes != sent

    async def _load_sizes(self) -> None:
        known = self._sizes
        stored = await self._store.get()
        if self._sizes != known:
            return  # scaled while we were reading: the newer value wins, and is still to be saved
        if stored is None:
            self._unsaved = True
        else:
            self._sizes = stored

    async def _follow_sizes(self) -> None:
        while True:
            if self._state_ready():
                await self.sync_sizes()
            await asyncio.sleep(SIZES_S)

    def _state_ready(self) -> bool:
        return not self._embedded_state or any(
            view.role == MemberRole.STATE.value and view.state is MemberState.READY for view in self._views.values()
        )

    def _desired(self) -> dict[MemberRole, int]:
        desired = {
            MemberRole.STATE: int(self._embedded_state),
            MemberRole.ROUTER: self._routers,
            MemberRole.PREFILL: self._sizes.prefill,
            MemberRole.DECODE: self._sizes.decode,
        }
        return {role: 0 if role in self._off else count for role, count in desired.items()}

    def _members(self) -> list[Member]:
        return [Member(view.worker_id, MemberRole(view.role), view.state, view.order) for view in self._views.values()]

    async def _look(self) -> None:
        async def look(view: ChildView) -> ChildView:
            try:
                return await self._hosts.view(view.worker_id)
            except HostLost as error:
                return replace(view, state=MemberState.LOST, pid=0, last_end=error.message)

        for view in await asyncio.gather(*(look(view) for view in self._views.values())):
            self._views[view.worker_id] = view

    async def _act(self, action: Action) -> None:
        match action:
            case Forget(worker_id):
                await self._hosts.forget(worker_id)
                gone = self._views.pop(worker_id)
                if gone.state is MemberState.LOST:
                    self._lost[worker_id] = self._with_history(gone)
                else:
                    self._lost.pop(worker_id, None)
                log.info("host_forgotten", worker_id=worker_id, state=gone.state.value, reason=gone.last_end)
            case Drain(worker_id):
                log.info("draining", worker_id=worker_id)
                await self._hosts.drain(worker_id)
            case Start(worker_id, role):
                self._order += 1
                log.info("starting", worker_id=worker_id)
                await self._hosts.start(worker_id, role, self._order)
                self._views[worker_id] = pending_view(worker_id, role, self._order)


def pending_view(worker_id: WorkerId, role: MemberRole, order: int) -> ChildView:
    """A host that was asked for and has not spoken yet."""
    return ChildView(worker_id, role.value, MemberState.STARTING, 0, 0, "", 0, "", order)


class LocalHosts:
    """The fake beside the seam: keepers in this process. `specify` makes the child's spec."""

    def __init__(self, specify: Callable[[WorkerId, MemberRole, int], ChildSpec]) -> None:
        self._specify = specify
        self._keepers: dict[WorkerId, ChildKeeper] = {}

    async def existing(self) -> list[ChildView]:
        return [keeper.view() for keeper in self._keepers.values()]

    async def start(self, worker_id: WorkerId, role: MemberRole, order: int) -> None:
        keeper = ChildKeeper(self._specify(worker_id, role, order))
        self._keepers[worker_id] = keeper
        keeper.start()

    async def view(self, worker_id: WorkerId) -> ChildView:
        return self._keeper(worker_id).view()

    async def drain(self, worker_id: WorkerId) -> None:
        self._keeper(worker_id).request_stop()

    async def forget(self, worker_id: WorkerId) -> None:
        keeper = self._keepers.pop(worker_id, None)
        if keeper is not None:
            await keeper.stop()

    def _keeper(self, worker_id: WorkerId) -> ChildKeeper:
        try:
            return self._keepers[worker_id]
        except KeyError:
            raise HostLost(f"no host for {worker_id}") from None
