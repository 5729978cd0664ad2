"""A decode worker's process: see `cluster.worker_server` for its life."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from twostroke.cluster.config import Config
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.worker_server import Station, WorkerServer, open_station
from twostroke.decode_worker.scheduler import DecodeLimits
from twostroke.decode_worker.worker import DecodeWorker
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
    section = config.decode
    limits = DecodeLimits(
        max_running=section.max_running,
        max_waiting=section.max_waiting,
        lease_ttl_s=section.lease_ttl_s,
        max_preemptions=section.max_preemptions,
        local_resume_tokens=section.local_resume_tokens,
    )
    async with open_station(config, Role.DECODE, worker_id) as station:
        info, server = station.info, station.listener.server
        publish = station.publisher.publish
        worker = DecodeWorker(info, station.executor, limits, publish, station.metrics, station.grammars)
        timeout_s = config.transfer.operation_timeout_s
        add_transfer_services(server, worker.book, station.executor.memory, info.incarnation, timeout_s)
        services, closers = [TRANSFER_SERVICE], []
        if "collective" in info.transports:
            servicer = await asyncio.to_thread(_make_collective, station, worker)
            kv_transfer_pb2_grpc.add_KvCollectiveServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            services.append(COLLECTIVE_SERVICE)
            closers.append(servicer.close)
        await WorkerServer(station, worker, services, closers).run(stop, on_ready)


def _make_collective(station: Station, worker: DecodeWorker) -> "CollectiveServicer":
    """Blocks while torch is imported, which happens only here."""
    from twostroke.cluster.transport.collective_server import CollectiveServicer

    return CollectiveServicer(
        worker.book,
        station.executor.memory,
        station.info.incarnation,
        host=station.listener.host,
        device=station.info.device,
        operation_timeout_s=station.config.transfer.operation_timeout_s,
        max_groups=station.config.transfer.max_groups,
    )
