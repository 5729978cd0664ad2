"""What both roles' workers are: an engine thread on one side, routers on the other, the event loop between.

    engine thread                                event loop
    on_events: hooks.on_engine(event)   ------>  ToRouter -> that router's outlet; Published -> publish;
               (at once, on that thread)         answers -> who asked; anything else -> hooks.on_loop(event)
    inbox      <---------------------------      FromRouter, RouterGone, Drain, questions, and what hooks post

    life: made -> start() -> warm -> attach ... drain() -> stop()

1. A router's stream is one session. When it breaks, `RouterGone` frees everything held for that router.
2. Load reports go to every router each 500 ms, and within 20 ms of a change that may wake a waiting request.
3. Healthy is who can serve: a warm-up step has run, the engine thread has not ended (that also sets `failed`, upon
   which the service ends the process), and it is not stalled (`running > 0` and no step for 10 s).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.link import Outlet
from twostroke.cluster.core.messages import Ended, LoadReport, Refused, RouterMessage, WorkerCheck, WorkerInfo
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.engine.commands import (
    Check,
    Checked,
    Command,
    Drain,
    Event,
    Published,
    RouterGone,
    Snapshot,
    SnapshotTaken,
    ToRouter,
    WarmedUp,
)
from twostroke.engine.executor import Executor
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.grammar_desk import GrammarDesk
from twostroke.engine.loop import EngineLoop
from twostroke.engine.scheduling import RoleScheduler

log = structlog.get_logger(__name__)

LOAD_INTERVAL_S = 0.5
LOAD_PAUSE_S = 0.02
"""Least time between two load reports."""
STALLED_S = 10.0
ANSWER_TIMEOUT_S = 5.0
"""Of the engine to a question; it answers between two steps."""

A = TypeVar("A", SnapshotTaken, Checked)


class RoleHooks(Protocol):
    """What a role adds to the host."""

    def on_engine(self, event: Event) -> None:
        """On the engine thread, before any router can hear of it; must not block."""
        ...

    def on_loop(self, event: Event) -> None:
        """On the event loop, for events that are neither a router's nor the host's."""
        ...

    @property
    def num_transfers(self) -> int:
        """Shipments, or leases in the lease book, that have not ended."""
        ...


class WorkerHost:
    """Implements `core.link.WorkerApp`. Except for `post`, its methods are for the event loop's thread."""

    def __init__(
        self,
        info: WorkerInfo,
        scheduler: RoleScheduler,
        executor: Executor,
        hooks: RoleHooks,
        publish: Callable[[PrefixBatch], None],
        metrics: WorkerMetrics,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._info = info
        self._hooks = hooks
        self._publish = publish
        self._metrics = metrics
        self.scheduler = scheduler
        """For checks at rest; while the engine runs it is the engine thread's alone."""
        self.engine = EngineLoop(scheduler, executor, self._on_events, name=f"engine-{info.worker_id}")
        self.desk = GrammarDesk(grammars, self.post, self._tell)
        self.warm = asyncio.Event()
        """The engine has run a real step."""
        self.failed = asyncio.Event()
        self._sessions: dict[Incarnation, _Session] = {}
        self._questions: dict[int, asyncio.Future[SnapshotTaken | Checked]] = {}
        self._next_question = 0
        self._tasks = TaskOwner(f"host.{info.worker_id}")
        self._loop: asyncio.AbstractEventLoop
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._last_key: object = None

    @property
    def info(self) -> WorkerInfo:
        return self._info

    # -------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Start the engine and the load reports. Called once, on the event loop that serves the routers."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        self._changed.set()
        self._tasks.spawn(self._report(), "report")

    async def drain(self, timeout_s: float) -> bool:
        self.post(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End the engine after its step under way; idempotent. Raises TimeoutError when the step does not return."""
        await self._tasks.close()
        await self.desk.close()
        await asyncio.to_thread(self.engine.stop)
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the worker stops"))

    # ----------------------------------------------------------------------------------------- routers

    @property
    def num_attached(self) -> int:
        return len(self._sessions)

    def attach(self, router: Incarnation, outlet: Outlet) -> "_Session":
        older = self._sessions.get(router)
        if older is not None:
            older.closed("the router attached again")
        session = _Session(self, router, outlet)
        self._sessions[router] = session
        outlet.deliver([self.load()])
        return session

    def detach(self, session: "_Session") -> None:
        """The session's end; called once for each."""
        if self._sessions.get(session.router) is session:
            del self._sessions[session.router]
            self.desk.forget(session.router)
            self.post(RouterGone(session.router))

    # ------------------------------------------------------------------------------------------ engine

    def post(self, command: Command) -> None:
        """Hand a command to the engine, from any thread; what it changes in the load is reported soon."""
        self.engine.post(command)
        self._on_event_loop(self._changed.set)

    def _on_events(self, events: list[Event]) -> None:
        """On the engine thread."""
        for event in events:
            self._hooks.on_engine(event)
        self._on_event_loop(lambda: self._route(events))

    def _on_event_loop(self, action: Callable[[], object]) -> None:
        # A closed loop means that the process is ending: nobody is left to hear of it.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _route(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case WarmedUp():
                    self.warm.set()
                case ToRouter():
                    self._tell(event)
                case Published(batch):
                    self._publish(batch)
                case SnapshotTaken() | Checked():
                    waiting = self._questions.get(event.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(event)
                case _:
                    self._hooks.on_loop(event)
        self._changed.set()

    def _tell(self, event: ToRouter) -> None:
        self._count(event.messages)
        session = self._sessions.get(event.router)
        if session is None:
            self._metrics.dropped_messages.of("router_gone").inc(len(event.messages))
        else:
            session.outlet.deliver(event.messages)

    def _count(self, messages: Sequence[object]) -> None:
        for message in messages:
            if isinstance(message, Ended):
                self._metrics.on_ended(message)
            elif isinstance(message, Refused):
                self._metrics.refusals.of(message.reason.value).inc()

    async def snapshot(self) -> PrefixSnapshot:
        """Raises Unavailable when the engine does not answer in time."""
        return (await self._ask(Snapshot, SnapshotTaken)).snapshot

    async def check(self) -> WorkerCheck:
        """Raises Unavailable when the engine does not answer in time."""
        checked = await self._ask(Check, Checked)
        return WorkerCheck(checked.load, checked.fault, self._hooks.num_transfers)

    async def _ask(self, question: Callable[[int], Snapshot | Check], kind: type[A]) -> A:
        """The engine's answer. Raises Unavailable."""
        self._next_question += 1
        number = self._next_question
        waiting: asyncio.Future[SnapshotTaken | Checked] = asyncio.get_running_loop().create_future()
        self._questions[number] = waiting
        self.post(question(number))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await waiting
        except TimeoutError:
            raise Unavailable(f"the engine of {self._info.worker_id} does not answer") from None
        finally:
            del self._questions[number]
        assert isinstance(answer, kind)
        return answer

    # -------------------------------------------------------------------------------------------- load

    def load(self) -> LoadReport:
        return self.engine.load()

    def health(self) -> str:
        """Empty when work can be done here now, else why not."""
        if not self.engine.alive:
            return f"the engine ended: {self.engine.failed or 'stopped'}"
        if not self.warm.is_set():
            return "warming up"
        load = self.load()
        if load.running > 0 and load.step_age_s > STALLED_S:
            return f"the engine is stalled: {load.running} jobs run and no step ended for {load.step_age_s:.1f} s"
        return "draining" if load.draining else ""

    async def _report(self) -> None:
        while self.engine.alive:
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation that meets the event.
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                self._report_load(changed_only=False)
                continue
            self._changed.clear()
            self._report_load(changed_only=True)
            await asyncio.sleep(LOAD_PAUSE_S)
            # A command that was posted just now may have been at work without an event to tell of it.
            self._report_load(changed_only=True)
        log.error("engine_ended", worker=self._info.worker_id, error=self.engine.failed)
        self.failed.set()

    def _report_load(self, changed_only: bool) -> None:
        load = self.load()
        if load.draining and load.running == load.waiting == load.leases == 0 and load.ledger.at_rest:
            self._drained.set()
        key = replace(load, step_age_s=0.0, num_steps=0, generated_tokens=0)
        if changed_only and key == self._last_key:
            return
        self._last_key = key
        self._metrics.on_load(load)
        for session in list(self._sessions.values()):
            session.outlet.deliver([load])


class _Session:
    """One router's attachment; implements `core.link.WorkerSession`."""

    def __init__(self, host: WorkerHost, router: Incarnation, outlet: Outlet) -> None:
        self._host = host
        self.router = router
        self.outlet = outlet

    def receive(self, messages: Sequence[RouterMessage]) -> None:
        for message in messages:
            self._host.desk.receive(self.router, message)

    def closed(self, reason: str) -> None:
        self._host.detach(self)
