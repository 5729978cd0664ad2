"""A router process.

    1. tokenizer from the model's directory; dispatcher; discovery attaches to the workers that Redis names
    2. HTTP and gRPC listen; `on_ready` says where
    3. `stop` is set: no new requests, the live ones finish (`drain_s` at most), then the faces close, then the
       links, then the state store: what a request still needs goes last (FIELD-REPORTS D17)

A router imports no torch: ids and text come from `tokenizers`, templates from jinja2.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # the stubs lack it
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from twostroke.cluster import attach
from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.config import Config
from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import new_incarnation
from twostroke.cluster.core.link import LinkListener, WorkerLink
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.state.store import open_state
from twostroke.cluster.telemetry.metrics import RouterMetrics, new_registry
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.proto.v1 import inference_pb2, inference_pb2_grpc
from twostroke.router.continuation import ContinuationTokens
from twostroke.router.discovery import Discovery
from twostroke.router.dispatcher import Dispatcher
from twostroke.router.gateway.app import create_app
from twostroke.router.gateway.server import http_server, listen
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.self_test import ship_once
from twostroke.router.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer

log = structlog.get_logger(__name__)

HEALTH_INTERVAL_S = 0.5
CLOSE_S = 5


def make_tokenizer(config: Config) -> Tokenizer:
    """Blocking. Raises ConfigError when `model.source` is not a directory: `up` resolves it before."""
    if config.model.fake:
        return ByteTokenizer(config.router.templates)
    directory = Path(config.model.source)
    if not directory.is_dir():
        raise ConfigError([f"model.source: {config.model.source} is not a directory; a router takes a resolved one"])
    return ModelTokenizer(directory, config.router.templates)


async def run(config: Config, stop: asyncio.Event, on_ready: Callable[[Mapping[str, str]], None]) -> None:
    """Serve until `stop` is set, then drain. Raises ConfigError, or OSError for a taken port."""
    tokenizer = await asyncio.to_thread(make_tokenizer, config)
    continuations = await asyncio.to_thread(ContinuationTokens.of, config.router.budget)
    registry = new_registry()
    metrics = RouterMetrics(registry, config.model.name or config.model.source)
    incarnation = new_incarnation()
    dispatcher = Dispatcher(config.router, tokenizer.text_decoders, metrics, model_name=config.model.name)

    async def connect(info: WorkerInfo) -> WorkerLink:
        return await attach.connect(info.address, incarnation, dispatcher)

    async def fetch_snapshot(info: WorkerInfo) -> PrefixSnapshot:
        return await attach.fetch_snapshot(info.address)

    async def connect_apart(info: WorkerInfo, listener: LinkListener) -> WorkerLink:
        return await attach.connect(info.address, new_incarnation(), listener)

    async def prove(prefill: WorkerInfo, decode: WorkerInfo) -> None:
        await ship_once(prefill, decode, connect_apart)

    async with open_state(config) as state:
        discovery = Discovery(state.registry, state.events, dispatcher, connect, prove, fetch_snapshot)
        gate = GrammarGate()
        app = create_app(
            dispatcher, tokenizer, config.router, metrics, registry, gate=gate, continuations=continuations
        )
        servicer = InferenceServicer(dispatcher, tokenizer, config.router, metrics, gate, continuations)
        faces = Faces(config, dispatcher, servicer, app)
        try:
            discovery.start()
            await gate.open()
            http, grpc_address = await faces.open()
            log.info("router_ready", incarnation=incarnation, http=http, grpc=grpc_address)
            on_ready({"role": "router", "incarnation": incarnation, "http": http, "grpc": grpc_address})
            await stop.wait()
            log.info("router_draining", live=dispatcher.num_live)
            if not await dispatcher.drain(config.ray.drain_s):
                log.warning("drain_incomplete", live=dispatcher.num_live)
        finally:
            await faces.close()
            await gate.close()
            await discovery.close()
            await dispatcher.close()
    log.info("router_stopped", incarnation=incarnation)


class Faces:
    """The HTTP and the gRPC server of one router. `open` once, `close` once."""

    def __init__(self, config: Config, dispatcher: Dispatcher, servicer: InferenceServicer, app: ASGIApp) -> None:
        self._config = config.router
        self._dispatcher = dispatcher
        self._grpc = new_server()
        self._health = health_aio.HealthServicer()
        self._name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
        self._tasks = TaskOwner("router")
        self._http = http_server(app, CLOSE_S)
        # Signals are the process's (control.process), not uvicorn's.
        self._http_done = asyncio.Event()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._grpc)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((self._name, health_name, reflection.SERVICE_NAME), self._grpc)

    async def open(self) -> tuple[str, str]:
        """(HTTP address, gRPC address). Raises OSError when a port is taken."""
        host = self._config.host
        listener = listen(host, self._config.http_port)
        grpc_port = bind(self._grpc, host, self._config.grpc_port)
        await self._grpc.start()
        self._tasks.spawn(self._serve_http(listener), "http")
        self._tasks.spawn(self._watch_health(), "health")
        return f"{host}:{listener.getsockname()[1]}", f"{host}:{grpc_port}"

    async def _serve_http(self, listener: socket.socket) -> None:
        try:
            with listener:
                await self._http._serve([listener])  # `serve` would take the process's signals
        finally:
            self._http_done.set()

    async def _watch_health(self) -> None:
        """The standard health service says what /health/ready says."""
        last: bool | None = None
        while True:
            ready = self._dispatcher.ready
            if ready != last:
                status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
                for name in ("", self._name):
                    await self._health.set(name, status)
                last = ready
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def close(self) -> None:
        self._http.should_exit = True
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._http.started:
                    await self._http_done.wait()
        except TimeoutError:
            log.warning("http_close_timed_out")
        await self._grpc.stop(CLOSE_S)
        await self._tasks.close()
