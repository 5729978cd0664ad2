"""A worker process's face to the world, shared by both roles.

    1. the gRPC server listens first, because its port is part of the worker's identity card
    2. the role makes its executor and worker; attach, health and reflection are added; the engine starts
       and runs a warm-up step: until then the worker is not ready, and in no registry
    3. registered in Redis, renewed every third of the TTL; prefix batches go to the event log; /metrics serves
    4. `stop` is set, or the engine ended
    5. drain: off the registry, not ready, nothing new; what was accepted is finished, for `drain_s` at most
    6. streams are flushed and closed, then the server, the worker, the state store

Redis is never waited for: while it cannot be reached, registration is tried again and batches are dropped, which
routers heal by a snapshot.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # the stubs lack it
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.attach import AttachServicer
from twostroke.cluster.config import Config
from twostroke.cluster.core.errors import InternalError, Unavailable
from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import WorkerId, new_incarnation
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.state.base import EventLog
from twostroke.cluster.state.store import StateStore, open_state
from twostroke.cluster.telemetry.metrics import WorkerMetrics, new_registry
from twostroke.cluster.transport.usable import usable_transports
from twostroke.cluster.wire.address import advertised_host
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.cluster.worker_host import WorkerHost
from twostroke.engine.build import describe_worker, make_executor
from twostroke.engine.executor import Executor
from twostroke.engine.grammar import GrammarCompiler
from twostroke.proto.v1 import worker_pb2
from twostroke.proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server

log = structlog.get_logger(__name__)

PUBLISH_QUEUE = 1024
"""Prefix batches that wait for the event log; over it the oldest are dropped."""
RETRY_S = 1.0
HEALTH_INTERVAL_S = 0.5
FLUSH_S = 2.0
STATE_CLOSE_S = 2.0


class Worker(Protocol):
    """What a role's worker is to its process."""

    @property
    def host(self) -> WorkerHost: ...

    def start(self) -> None: ...

    async def close(self) -> None: ...


class Listener:
    """The gRPC server before and after there is a worker behind it."""

    def __init__(self, config: Config, host: str) -> None:
        """`host` is what others connect to (`open_listener`). Raises OSError when the port is taken."""
        self.server = new_server()
        self.host = host
        self.address = f"{self.host}:{bind(self.server, config.worker.host, config.worker.port)}"


async def open_listener(config: Config) -> Listener:
    """Raises OSError when the port is taken, ConfigError when no other machine could reach this one."""
    worker = config.worker
    return Listener(config, await asyncio.to_thread(advertised_host, worker.host, worker.advertise, config.redis.url))


@dataclass(frozen=True, slots=True)
class Station:
    """What a role builds its worker from, made by `open_station`."""

    config: Config
    listener: Listener
    executor: Executor
    grammars: GrammarCompiler
    info: WorkerInfo
    state: StateStore
    publisher: "Publisher"
    metrics: WorkerMetrics
    metrics_registry: CollectorRegistry


@contextlib.asynccontextmanager
async def open_station(config: Config, role: Role, worker_id: WorkerId) -> AsyncIterator[Station]:
    """Listen, load the model, and reach for the state store. Raises OSError when the port is taken, ConfigError for
    a model that cannot be served and when no other machine could reach this one.
    """
    listener = await open_listener(config)
    built = await asyncio.to_thread(make_executor, config, role)
    transports = usable_transports(config.transfer.transports)
    info = describe_worker(config, role, worker_id, new_incarnation(), listener.address, built, transports)
    registry = new_registry()
    metrics = WorkerMetrics(registry, info.model, worker_id)
    async with open_state(config) as state:
        publisher = Publisher(state.events)
        yield Station(config, listener, built.executor, built.grammars, info, state, publisher, metrics, registry)


class Publisher:
    """Prefix batches on their way to the event log; never blocks, drops the oldest when the log cannot keep up."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._waiting: deque[PrefixBatch] = deque(maxlen=PUBLISH_QUEUE)
        self._wake = asyncio.Event()
        self.num_dropped = 0

    def publish(self, batch: PrefixBatch) -> None:
        self.num_dropped += len(self._waiting) == PUBLISH_QUEUE
        self._waiting.append(batch)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._waiting.popleft()
                try:
                    await self._events.publish(batch)
                except Unavailable as error:
                    self.num_dropped += 1
                    log.warning("batch_dropped", sequence=batch.sequence, error=error.message)
                    await asyncio.sleep(RETRY_S)


class WorkerServer:
    """One worker process, from step 2 on. Use `run` once."""

    def __init__(
        self,
        station: Station,
        worker: Worker,
        service_names: Sequence[str] = (),
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`service_names` are those that the role has mounted on the listener's server, for reflection; `closers`
        end their long streams, which the server would wait for.
        """
        self._config = station.config
        self._server = station.listener.server
        self._worker = worker
        self._host = worker.host
        self._registry = station.state.registry
        self._publisher = station.publisher
        self._metrics_registry = station.metrics_registry
        self._closers = tuple(closers)
        self._attach = AttachServicer(worker.host)
        self._health = health_aio.HealthServicer()
        self._tasks = TaskOwner(f"server.{worker.host.info.worker_id}")
        self._leaving = False
        self._last_health: str | None = None
        own = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
        self._watched = ("", own)
        add_WorkerServicer_to_server(self._attach, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (own, health_name, reflection.SERVICE_NAME, *service_names)
        reflection.enable_server_reflection(names, self._server)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[WorkerInfo], None]) -> None:
        """Serve until `stop`, then drain and close everything. Raises InternalError when the engine ended."""
        info = self._host.info
        self._worker.start()
        http, _ = start_http_server(
            self._config.telemetry.metrics_port, addr=self._config.worker.host, registry=self._metrics_registry
        )
        try:
            await self._server.start()
            self._tasks.spawn(self._watch_health(), "health")
            await self._until(stop, self._host.failed, self._host.warm)
            if self._host.warm.is_set():
                await self._tell_health()
                self._tasks.spawn(self._publisher.run(), "publisher")
                self._tasks.spawn(self._keep_registered(), "registration")
                log.info("worker_ready", worker=info.worker_id, address=info.address, metrics_port=http.server_port)
                on_ready(info)
            await self._until(stop, self._host.failed)
            if not self._host.failed.is_set():
                await self._drain()
        finally:
            await self._close()
            await asyncio.to_thread(http.shutdown)
            http.server_close()
        if self._host.failed.is_set():
            raise InternalError(f"the engine of {info.worker_id} ended: {self._host.engine.failed}")

    @staticmethod
    async def _until(*events: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(event.wait()) for event in events]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _drain(self) -> None:
        drain_s, load = self._config.ray.drain_s, self._host.load()
        log.info(
            "worker_draining",
            worker=self._host.info.worker_id,
            drain_s=drain_s,
            running=load.running,
            waiting=load.waiting,
            leases=load.leases,
        )
        await self._leave()
        if await self._host.drain(drain_s):
            log.info("worker_drained", worker=self._host.info.worker_id)
        else:
            log.warning("drain_incomplete", worker=self._host.info.worker_id, load=repr(self._host.load()))

    async def _close(self) -> None:
        await self._attach.close("the worker stops", FLUSH_S)
        await self._leave()
        await self._tasks.close()
        for closer in self._closers:
            await closer()
        await self._server.stop(FLUSH_S)
        await self._worker.close()
        log.info("worker_stopped", worker=self._host.info.worker_id)

    # ---------------------------------------------------------------------------------------- registry

    async def _keep_registered(self) -> None:
        interval_s = self._config.redis.registration_ttl_s / 3
        lost = False
        while not self._leaving:
            if self._host.load().draining:
                await self._leave()
                return
            try:
                await self._registry.renew(self._host.info)
            except Unavailable as error:
                if not lost:
                    log.warning("registration_failed", worker=self._host.info.worker_id, error=error.message)
                lost = True
                await asyncio.sleep(min(RETRY_S, interval_s))
                continue
            if lost:
                log.info("registered_again", worker=self._host.info.worker_id)
            lost = False
            await asyncio.sleep(interval_s)

    async def _leave(self) -> None:
        """Off the registry, as far as it can be reached; an entry that stays expires."""
        if self._leaving:
            return
        self._leaving = True
        try:
            async with asyncio.timeout(STATE_CLOSE_S):
                await self._registry.deregister(self._host.info.incarnation)
        except (Unavailable, TimeoutError) as error:
            log.warning("deregistration_failed", worker=self._host.info.worker_id, error=repr(error))

    # ------------------------------------------------------------------------------------------ health

    async def _watch_health(self) -> None:
        while True:
            await self._tell_health()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _tell_health(self) -> None:
        """What the standard health service says: whether work can be done here now."""
        reason = self._host.health()
        if reason == self._last_health:
            return
        self._last_health = reason
        status = health_pb2.HealthCheckResponse.NOT_SERVING if reason else health_pb2.HealthCheckResponse.SERVING
        for name in self._watched:
            await self._health.set(name, status)
        log.info("health_changed", worker=self._host.info.worker_id, reason=reason or "serving")
