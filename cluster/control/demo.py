"""`make demo`: a whole cluster of real processes answers with a real model, shows its work, and leaves nothing.

1. fetch the demo model, once
2. Ray, Valkey, one router, one prefill and one decode worker: each its own process
3. the same question over streaming HTTP and over gRPC; the answers appear as they are generated
4. where the time of each went, and what was shipped from the prefill to the decode worker
5. a long prompt twice, with different questions at its end: the second finds the prefix in the cache
6. everything down again, also after Ctrl-C
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cluster.config import Config
from twostroke.cluster.control import lifecycle
from twostroke.cluster.control.client import stream_chat
from twostroke.cluster.control.commands_cluster import announcer
from twostroke.cluster.control.context import EXIT_FAILED, Context, console
from twostroke.cluster.control.grpc_client import stream_chat_grpc
from twostroke.cluster.control.launch import ClusterFiles
from twostroke.cluster.control.models import resolve_model
from twostroke.cluster.control.supervisor import MemberRole
from twostroke.cluster.core.errors import TwostrokeError, Unavailable

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MAX_TOKENS = 32
UP_TIMEOUT_S = 240.0
PHASES = ("queue", "route", "reserve", "prefill", "transfer", "decode")

LONG_PREFIX = (
    "You are the guide of a small museum of engines. The museum has four rooms. The first room shows a steam "
    "engine of 1788 with a sun and planet gear, which once drove a mill on the river. The second room shows a "
    "two-stroke engine of 1881: one stroke draws in and compresses the charge, the other burns it and drives the "
    "piston down, so each turn of the crankshaft gives power. The third room shows a radial engine with nine "
    "cylinders, taken from a mail plane that crossed the mountains every night for six years. The fourth room is "
    "a workshop, where visitors may take a small engine apart and put it together again under the eyes of a "
    "retired mechanic. The museum opens at ten in the morning and closes at five in the afternoon; on Mondays it "
    "is closed. Answer visitors briefly. "
)


@dataclass(frozen=True, slots=True)
class Answer:
    title: str
    text: str
    usage: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.report.get("cached_tokens", 0))


def demo_config(base: Config) -> Config:
    """One worker of each role on free ports, small pools; every prompt goes through both workers."""
    policy = base.router.policy.model_copy(update={"local_threshold_tokens": 0})
    return base.model_copy(
        update={
            "cluster": f"demo-{os.getpid()}",
            "pages": base.pages.model_copy(update={"num_pages": min(base.pages.num_pages, 256)}),
            "prefill": base.prefill.model_copy(update={"replicas": 1}),
            "decode": base.decode.model_copy(update={"replicas": 1}),
            "router": base.router.model_copy(update={"http_port": 0, "grpc_port": 0, "policy": policy}),
            "ray": base.ray.model_copy(update={"drain_s": min(base.ray.drain_s, 10.0)}),
        }
    )


def run_demo(config: Config, ours: Context) -> int:
    """Exit code: 0 when both answers are right and the prefix hit is real."""
    out = console()
    try:
        with out.status("resolving the model") as spinner:
            config = resolve_model(config, ours.models, announcer(out, spinner.update))
        with _cluster(config, ours, out) as router:
            return _converse(router["http"], router["grpc"], out)
    except TwostrokeError as error:
        typer.echo(f"error: {error.message}", err=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return 128 + signal.SIGINT


@contextmanager
def _cluster(config: Config, ours: Context, out: Console) -> Iterator[Mapping[str, Any]]:
    """Brought up and, whatever happens, taken down; yields the router's ready record."""
    directory = Path(tempfile.mkdtemp(prefix="twostroke-demo-"))
    files = ClusterFiles(directory / config.cluster)
    before = signal.signal(signal.SIGTERM, _interrupt)
    kept = False
    try:
        with out.status("starting") as spinner:
            fleet = lifecycle.up(config, files, ours.environment, announcer(out, spinner.update), UP_TIMEOUT_S)
        yield next(view.ready for view in fleet.views if view.role == MemberRole.ROUTER.value)
    except Unavailable:
        kept = True
        out.print(f"logs: {files.logs}", soft_wrap=True)
        raise
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        with out.status("stopping") as spinner:
            lifecycle.down(files, announcer(out, spinner.update))
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _converse(http: str, grpc: str, out: Console) -> int:
    question = [{"role": "user", "content": QUESTION}]
    answers = [
        _ask_http(f"HTTP  {QUESTION}", http, question, out),
        _ask_grpc(f"gRPC  {QUESTION}", grpc, question, out),
    ]
    rooms = [
        _ask_http(
            f"HTTP  a long prompt, question {number}", http, [{"role": "user", "content": LONG_PREFIX + asked}], out
        )
        for number, asked in enumerate(("What is in the second room?", "When does the museum close?"), start=1)
    ]
    out.print(_table([*answers, *rooms]))
    right = all(EXPECTED in answer.text for answer in answers)
    hit = rooms[1].cached_tokens
    shipped = all(int(answer.report.get("pages_shipped", 0)) > 0 for answer in (answers[0], rooms[0]))
    out.print(f"{EXPECTED} in both answers: {'yes' if right else 'NO'}")
    out.print(f"prefix hit of the second long prompt: {hit} of {rooms[1].usage.get('prompt_tokens', 0)} prompt tokens")
    if not shipped:
        out.print("NO pages were shipped from the prefill to the decode worker")
    return 0 if right and shipped and hit > rooms[0].cached_tokens else EXIT_FAILED


def _ask_http(title: str, address: str, messages: list[dict[str, str]], out: Console) -> Answer:
    _show_title(title, out)
    text = ""
    usage: Mapping[str, Any] = {}
    report: Mapping[str, Any] = {}
    for chunk in stream_chat(f"http://{address}", messages, max_tokens=MAX_TOKENS):
        typer.echo(chunk.text, nl=False)
        text, usage, report = text + chunk.text, chunk.usage or usage, chunk.report or report
    typer.echo("")
    return Answer(title, text, usage, report)


def _ask_grpc(title: str, address: str, messages: list[dict[str, str]], out: Console) -> Answer:
    _show_title(title, out)

    async def ask() -> Answer:
        text = ""
        usage: Mapping[str, Any] = {}
        report: Mapping[str, Any] = {}
        async for chunk in stream_chat_grpc(address, messages, max_tokens=MAX_TOKENS):
            typer.echo(chunk.text, nl=False)
            text, usage, report = text + chunk.text, chunk.usage or usage, chunk.report or report
        return Answer(title, text, usage, report)

    answer = asyncio.run(ask())
    typer.echo("")
    return answer


def _show_title(title: str, out: Console) -> None:
    out.print(f"\n[bold]{title}[/bold]")


def _table(answers: list[Answer]) -> Table:
    """Milliseconds by phase on the router's clock, which sum to the whole."""
    table = Table(title="Where the time went (ms)", title_justify="left", box=None, pad_edge=False)
    table.add_column("request")
    numbers = (*PHASES, "whole", "TTFT", "ITL", "prompt", "cached", "output", "pages", "bytes")
    for column in numbers:
        table.add_column(column, justify="right")
    table.add_column("transport")
    for answer in answers:
        report = answer.report
        times = [f"{report.get(f'{phase}_ms', 0.0):.1f}" for phase in (*PHASES, "duration", "ttft", "itl")]
        counts = [
            f"{int(report.get(name, 0)):,}"
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "pages_shipped", "bytes_shipped")
        ]
        table.add_row(answer.title, *times, *counts, str(report.get("transport", "-")))
    return table
