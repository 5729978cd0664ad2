"""A prefill worker's process: see `cluster.worker_server` for its life."""

import asyncio
from collections.abc import Callable

from twostroke.cluster.config import Config
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.worker_server import Station, WorkerServer, open_station
from twostroke.prefill_worker.scheduler import PrefillLimits
from twostroke.prefill_worker.worker import PrefillWorker


async def run(config: Config, worker_id: WorkerId, stop: asyncio.Event, on_ready: Callable[[WorkerInfo], None]) -> None:
    """Serve until `stop` is set, then drain. `on_ready` hears once when routers may attach.

    Raises ConfigError for a model that cannot be served, OSError for a taken port, InternalError when the engine
    ended on its own.
    """
    limits = PrefillLimits(max_waiting=config.prefill.max_waiting, hold_s=config.prefill.hold_s)
    async with open_station(config, Role.PREFILL, worker_id) as station:
        transports = await asyncio.to_thread(_make_transports, station)
        publish = station.publisher.publish
        worker = PrefillWorker(
            station.info, station.executor, limits, transports, publish, station.metrics, station.grammars
        )
        await WorkerServer(station, worker).run(stop, on_ready)


def _make_transports(station: Station) -> list[Transport]:
    """In the order of `info.transports`. Blocks while `collective` imports torch; `grpc` alone needs no torch."""
    transfer, info, memory = station.config.transfer, station.info, station.executor.memory
    made: list[Transport] = []
    for name in info.transports:
        if name == "grpc":
            made.append(
                GrpcTransport(
                    memory,
                    info.incarnation,
                    message_bytes=transfer.message_bytes,
                    operation_timeout_s=transfer.operation_timeout_s,
                )
            )
        elif name == "collective":
            from twostroke.cluster.transport.collective import CollectiveTransport

            made.append(
                CollectiveTransport(
                    memory,
                    info.incarnation,
                    host=station.listener.host,
                    device=info.device,
                    offer_bytes=transfer.offer_bytes,
                    operation_timeout_s=transfer.operation_timeout_s,
                    idle_group_s=transfer.idle_group_s,
                    max_groups=transfer.max_groups,
                )
            )
    return made
