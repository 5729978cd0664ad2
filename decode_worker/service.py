"""A decode worker's process: see `cluster.worker_server` for its life."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from twostroke.cluster.config import Config
from twostroke.cluster.core.ids import WorkerId, new_incarnation
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.telemetry.metrics import WorkerMetrics, new_registry
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.transport.usable import usable_transports
from twostroke.cluster.worker_server import Publisher, WorkerServer, open_listener, open_state
from twostroke.decode_worker.scheduler import DecodeLimits
from twostroke.decode_worker.worker import DecodeWorker
from twostroke.engine.build import describe_worker, make_executor
from twostroke.engine.executor import Executor
from twostroke.proto.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

if TYPE_CHECKING:
    from twostroke.cluster.transport.collective_server import CollectiveServicer

TRANSFER_SERVICE = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransfer"].full_name
COLLECTIVE_SERVICE = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvCollective"].full_name


async def run(config: Config, worker_id: WorkerId, stop: asyncio.Event, on_ready: Callable[[WorkerInfo], None]) -> None:
    """Serve until `stop` is set, then drain. `on_ready` hears once when routers may attach.

    Raises ConfigError for a model that cannot be served, OSError for a taken port, InternalError when the engine
    ended on its own.
    """
    listener = await open_listener(config)
    built = await asyncio.to_thread(make_executor, config, Role.DECODE)
    names = usable_transports(config.transfer.transports)
    info = describe_worker(config, Role.DECODE, worker_id, new_incarnation(), listener.address, built, names)
    registry = new_registry()
    metrics = WorkerMetrics(registry, info.model, worker_id)
    section = config.decode
    limits = DecodeLimits(
        max_running=section.max_running,
        max_waiting=section.max_waiting,
        lease_ttl_s=section.lease_ttl_s,
        max_preemptions=section.max_preemptions,
        local_resume_tokens=section.local_resume_tokens,
    )
    async with open_state(config) as state:
        publisher = Publisher(state.events)
        worker = DecodeWorker(info, built.executor, limits, publisher.publish, metrics)
        add_transfer_services(listener.server, worker.book, built.executor.memory, info.incarnation)
        services, closers = [TRANSFER_SERVICE], []
        if "collective" in info.transports:
            servicer = await asyncio.to_thread(_make_collective, config, listener.host, info, worker, built.executor)
            kv_transfer_pb2_grpc.add_KvCollectiveServicer_to_server(servicer, listener.server)  # type: ignore[no-untyped-call]
            services.append(COLLECTIVE_SERVICE)
            closers.append(servicer.close)
        server = WorkerServer(config, listener, worker, state, publisher, registry, services, closers)
        await server.run(stop, on_ready)


def _make_collective(
    config: Config, host: str, info: WorkerInfo, worker: DecodeWorker, executor: Executor
) -> "CollectiveServicer":
    """Blocks while torch is imported, which happens only here."""
    from twostroke.cluster.transport.collective_server import CollectiveServicer

    return CollectiveServicer(
        worker.book,
        executor.memory,
        info.incarnation,
        host=host,
        device=info.device,
        operation_timeout_s=config.transfer.operation_timeout_s,
        max_groups=config.transfer.max_groups,
    )
