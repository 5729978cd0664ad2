"""The router under `benchmarks.gateway`, in a process of its own: faces, dispatcher and attached streams as in
`twostroke run router`, without Redis: it is told where its workers are.

Over the pipe it says where it listens, and then, each time it is asked (SPANS), what its requests took since the last
time; OVER ends it.
"""

import asyncio
import contextlib
import cProfile
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from prometheus_client import Histogram

from twostroke.cluster import attach
from twostroke.cluster.config import Config, RouterSection
from twostroke.cluster.control.process import spare_start_up
from twostroke.cluster.core.ids import new_incarnation
from twostroke.cluster.telemetry.logs import configure_logging
from twostroke.cluster.telemetry.metrics import Family, RouterMetrics, new_registry
from twostroke.router.dispatcher import Dispatcher
from twostroke.router.gateway.app import create_app
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.service import Faces
from twostroke.router.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer

MODEL = "instant"
STAGES = ("parse", "tokenize", "choose")
SPANS, OVER = "spans", "over"

Spans = dict[str, list[float]]
"""By stage of a request the milliseconds of each, in order."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the process is told. `core` None: not pinned."""

    workers: tuple[str, ...]
    core: int | None
    tokenizer: Path | None
    profile: Path | None


def make_tokenizer(directory: Path | None) -> Tokenizer:
    return ByteTokenizer() if directory is None else ModelTokenizer(directory)


def run(setting: Setting, pipe: Connection) -> None:
    """Serve, say where, and end when the pipe does."""
    if setting.core is not None:
        os.sched_setaffinity(0, {setting.core})
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        configure_logging("info", "json", "router-0", nowhere)  # a line a request costs, wherever it goes
        if setting.profile is None:
            asyncio.run(_serve(setting, pipe))
            return
        profiler = cProfile.Profile()
        profiler.runcall(asyncio.run, _serve(setting, pipe))
        profiler.dump_stats(setting.profile)


async def _serve(setting: Setting, pipe: Connection) -> None:
    config = Config(router=RouterSection(http_port=0, grpc_port=0, max_queued=1024))
    tokenizer = await asyncio.to_thread(make_tokenizer, setting.tokenizer)
    registry = new_registry()
    metrics = RouterMetrics(registry, MODEL)
    metrics.router_overhead_seconds = noted = _Noted(metrics.router_overhead_seconds)
    dispatcher = Dispatcher(config.router, tokenizer.text_decoders, metrics, model_name=MODEL)
    for address in setting.workers:
        dispatcher.attach(await attach.connect(address, new_incarnation(), dispatcher))
    app = create_app(dispatcher, tokenizer, config.router, metrics, registry)
    faces = Faces(config, dispatcher, InferenceServicer(dispatcher, tokenizer, config.router, metrics), app)
    try:
        http, _ = await faces.open()
        spare_start_up()
        pipe.send(http)
        over = asyncio.Event()

        def on_message() -> None:
            with contextlib.suppress(EOFError):
                if pipe.recv() == SPANS:
                    pipe.send(noted.take())
                    return
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            over.set()

        asyncio.get_running_loop().add_reader(pipe.fileno(), on_message)
        await over.wait()
    finally:
        await faces.close()
        await dispatcher.close()


class _Noted(Family[Histogram]):
    """Histograms that also keep each value."""

    def __init__(self, histograms: Family[Histogram]) -> None:
        self._stages = {stage: _Stage(histograms.of(stage)) for stage in STAGES}

    def of(self, *values: str) -> Histogram:
        [stage] = values
        return cast(Histogram, self._stages[stage])

    def take(self) -> Spans:
        return {name: stage.take() for name, stage in self._stages.items()}


class _Stage:
    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._taken_ms: list[float] = []

    def observe(self, seconds: float) -> None:
        self._histogram.observe(seconds)
        self._taken_ms.append(1000 * seconds)

    def take(self) -> list[float]:
        taken, self._taken_ms = self._taken_ms, []
        return taken
