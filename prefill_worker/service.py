"""A prefill worker's process: see `cluster.worker_server` for its life."""

import asyncio
from collections.abc import Callable

from twostroke.cluster.config import Config
from twostroke.cluster.core.ids import WorkerId, new_incarnation
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.telemetry.metrics import WorkerMetrics, new_registry
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.transport.usable import usable_transports
from twostroke.cluster.worker_server import Publisher, WorkerServer, open_listener, open_state
from twostroke.engine.build import describe_worker, make_executor
from twostroke.engine.executor import Executor
from twostroke.prefill_worker.scheduler import PrefillLimits
from twostroke.prefill_worker.worker import PrefillWorker


async def run(config: Config, worker_id: WorkerId, stop: asyncio.Event, on_ready: Callable[[WorkerInfo], None]) -> None:
    """Serve until `stop` is set, then drain. `on_ready` hears once when routers may attach.

    Raises ConfigError for a model that cannot be served, OSError for a taken port, InternalError when the engine
    ended on its own.
    """
    listener = await open_listener(config)
    built = await asyncio.to_thread(make_executor, config, Role.PREFILL)
    names = usable_transports(config.transfer.transports)
    info = describe_worker(config, Role.PREFILL, worker_id, new_incarnation(), listener.address, built, names)
    registry = new_registry()
    metrics = WorkerMetrics(registry, info.model, worker_id)
    transports = await asyncio.to_thread(_make_transports, config, listener.host, built.executor, info)
    limits = PrefillLimits(max_waiting=config.prefill.max_waiting, hold_s=config.prefill.hold_s)
    async with open_state(config) as state:
        publisher = Publisher(state.events)
        worker = PrefillWorker(info, built.executor, limits, transports, publisher.publish, metrics)
        server = WorkerServer(config, listener, worker, state, publisher, registry)
        await server.run(stop, on_ready)


def _make_transports(config: Config, host: str, executor: Executor, info: WorkerInfo) -> list[Transport]:
    """In the order of `info.transports`. Blocks while `collective` imports torch; `grpc` alone needs no torch."""
    transfer = config.transfer
    made: list[Transport] = []
    for name in info.transports:
        if name == "grpc":
            made.append(
                GrpcTransport(
                    executor.memory,
                    info.incarnation,
                    message_bytes=transfer.message_bytes,
                    operation_timeout_s=transfer.operation_timeout_s,
                )
            )
        elif name == "collective":
            from twostroke.cluster.transport.collective import CollectiveTransport

            made.append(
                CollectiveTransport(
                    executor.memory,
                    info.incarnation,
                    host=host,
                    device=info.device,
                    offer_bytes=transfer.offer_bytes,
                    operation_timeout_s=transfer.operation_timeout_s,
                    idle_group_s=transfer.idle_group_s,
                    max_groups=transfer.max_groups,
                )
            )
    return made
