"""Commands that act on a whole cluster: up, status, scale, drain, down."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cluster.config import Config
from twostroke.cluster.control import lifecycle
from twostroke.cluster.control.context import Context, console
from twostroke.cluster.control.loads import read_loads
from twostroke.cluster.control.local_ray import Say
from twostroke.cluster.control.models import resolve_model
from twostroke.cluster.control.status_report import COLUMNS, report_process
from twostroke.cluster.control.supervisor import MemberRole
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.state.base import PoolSizes

if TYPE_CHECKING:
    from twostroke.cluster.control.fleet import FleetStatus

UP_TIMEOUT_S = 300.0
SCALE_TIMEOUT_S = 120.0

ClusterName = Annotated[str, typer.Option("--cluster", help="Name of the cluster, as in its configuration.")]
PrefillCount = Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers.")]
DecodeCount = Annotated[int | None, typer.Option("--decode", min=0, help="Decode workers.")]


def register(app: typer.Typer) -> None:
    for command in (up, status, scale, drain, down):
        app.command()(command)


def up(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file (YAML); default: the demo model.")] = None,
    prefill: PrefillCount = None,
    decode: DecodeCount = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds until all must be ready.")] = (
        UP_TIMEOUT_S
    ),
) -> None:
    """Bring a cluster up: model, Ray, state server, workers, router; then print its address."""
    ours: Context = context.obj
    settings = with_sizes(ours.config(config), prefill, decode)
    out = console()
    with out.status("resolving the model") as spinner:
        settings = resolve_model(settings, ours.models, spinner.update)
        result = lifecycle.up(
            settings, ours.files(settings.cluster), ours.environment, announcer(out, spinner.update), timeout_s
        )
    out.print(f"cluster [bold]{settings.cluster}[/bold] is up: {addresses(result)}")


def with_sizes(config: Config, prefill: int | None, decode: int | None) -> Config:
    if prefill is not None:
        config = config.model_copy(update={"prefill": config.prefill.model_copy(update={"replicas": prefill})})
    if decode is not None:
        config = config.model_copy(update={"decode": config.decode.model_copy(update={"replicas": decode})})
    return config


def addresses(status: "FleetStatus") -> str:
    """Where clients go, for example `http://127.0.0.1:8000/v1 and grpc 127.0.0.1:8001`."""
    routers = [view.ready for view in status.views if view.role == MemberRole.ROUTER.value and view.ready]
    return "; ".join(f"http://{ready['http']}/v1 and grpc {ready['grpc']}" for ready in routers) or "no router yet"


def status(
    context: typer.Context,
    cluster: ClusterName = "local",
    as_json: Annotated[bool, typer.Option("--json", help="For programs: everything known, bytes unrounded.")] = False,
) -> None:
    """Show every process: what it is, how it is, and what it holds."""
    ours: Context = context.obj
    record, files = ours.running(cluster)
    with lifecycle.connected(record, files, cluster) as client:
        fleet = client.status()
    loads = asyncio.run(read_loads(fleet.views))
    reports = [report_process(view, loads.get(view.worker_id)) for view in fleet.views]
    desired = {role.value: count for role, count in fleet.desired.items()}
    if as_json:
        processes = [report.as_json() for report in reports]
        typer.echo(json.dumps({"desired": desired, "settled": fleet.settled, "processes": processes}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for report in reports:
        table.add_row(*report.cells())
    out = console()
    out.print(table)
    sizes = ", ".join(f"{count} {role}" for role, count in desired.items())
    out.print(f"desired: {sizes}; {'settled' if fleet.settled else 'not settled'}")
    out.print(f"address: {addresses(fleet)}; logs: {files.logs}", soft_wrap=True)


def scale(
    context: typer.Context,
    prefill: PrefillCount = None,
    decode: DecodeCount = None,
    cluster: ClusterName = "local",
    wait: Annotated[bool, typer.Option(help="Wait until the workers are there, or gone.")] = True,
) -> None:
    """Change the number of prefill and decode workers. Those that leave finish what they have."""
    ours: Context = context.obj
    if prefill is None and decode is None:
        raise InvalidRequest("nothing to change: give --prefill, --decode, or both")
    record, files = ours.running(cluster)
    out = console()
    with lifecycle.connected(record, files, cluster) as client, out.status("scaling") as spinner:
        now = client.status().desired
        sizes = PoolSizes(
            now[MemberRole.PREFILL] if prefill is None else prefill,
            now[MemberRole.DECODE] if decode is None else decode,
        )
        client.scale(sizes)
        if wait:
            lifecycle.wait_settled(client, announcer(out, spinner.update), SCALE_TIMEOUT_S)
    out.print(f"{sizes.prefill} prefill, {sizes.decode} decode")


def drain(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Worker id, as `status` shows it.")],
    cluster: ClusterName = "local",
) -> None:
    """Take one worker out: it finishes what it has and leaves; its pool's desired size falls by one."""
    ours: Context = context.obj
    record, files = ours.running(cluster)
    with lifecycle.connected(record, files, cluster) as client:
        client.drain(WorkerId(worker))
    console().print(f"{worker} drains; `twostroke status` shows when it has gone")


def down(context: typer.Context, cluster: ClusterName = "local") -> None:
    """Drain and stop everything that `up` started."""
    ours: Context = context.obj
    out = console()
    with out.status("stopping") as spinner:
        was_up = lifecycle.down(ours.files(cluster), announcer(out, spinner.update))
    out.print(f"cluster {cluster!r} is down" if was_up else f"cluster {cluster!r} was not up")


def announcer(out: Console, show: Say) -> Say:
    """A spinner on a terminal; else one line for each new step."""
    last = ""

    def say(step: str) -> None:
        nonlocal last
        if out.is_terminal:
            show(step)
        elif step != last:
            out.print(step, soft_wrap=True)
        last = step

    return say
