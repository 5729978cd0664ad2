"""The composition root: the command line, the environment, and the one place that starts a role.

    twostroke up | status | scale | drain | down     a cluster on this machine (or a Ray that is there)
    twostroke chat | model pull | demo               using it
    twostroke run prefill | decode | router | state  one process of it; started by the host actors

Exit codes: 0 done, 1 it did not work (the reason is on standard error), 2 a mistake in arguments or configuration.
"""

import asyncio
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke import __version__
from twostroke.cluster.config import Config, load_config, with_secrets
from twostroke.cluster.control import commands_cluster, commands_use, valkey
from twostroke.cluster.control.context import Context, ErrorsToExitCodes
from twostroke.cluster.control.launch import ClusterFiles
from twostroke.cluster.control.process import OnReady, run_role
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from twostroke.cluster.core.messages import WorkerInfo

app = typer.Typer(
    cls=ErrorsToExitCodes,
    name="twostroke",
    help="Disaggregated prefill/decode serving for large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
commands_cluster.register(app)
commands_use.register(app)


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    STATE = "state"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twostroke {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand != run.__name__:  # which has its own, from its configuration
        configure_logging("warning", "console", "cli")
    context.obj = _context(os.environ)


def _context(environment: Mapping[str, str]) -> Context:
    """Everything under $TWOSTROKE_HOME, or where the desktop convention puts state and downloads."""
    if chosen := environment.get("TWOSTROKE_HOME"):
        home = Path(chosen).absolute()
        return Context(home, home / "models", environment)
    state = Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Context(state / "twostroke", cache / "twostroke", environment)


@app.command()
def run(
    role: Annotated[RoleName, typer.Argument(help="Which process of the cluster this is.")],
    config: Annotated[Path, typer.Option(help="Configuration file (YAML).")],
    worker_id: Annotated[str, typer.Option(help="Stable name; default: <role>-0.")] = "",
    parent_pipe: Annotated[
        int | None, typer.Option(help="Inherited socket: the ready line goes there, and its end means drain and exit.")
    ] = None,
) -> None:
    """Run one process of a cluster in the foreground; SIGTERM drains it."""
    settings = with_secrets(load_config(config), os.environ)
    name = WorkerId(worker_id or f"{role.value}-0")
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format, name)

    async def serve(stop: asyncio.Event, on_ready: OnReady) -> None:
        await _serve(role, settings, name, stop, on_ready)

    run_role(serve, parent_pipe, settings.ray.drain_s)


async def _serve(role: RoleName, config: Config, name: WorkerId, stop: asyncio.Event, on_ready: OnReady) -> None:
    """A role is imported only here, in its own process: a router needs no torch, a worker no HTTP server."""
    match role:
        case RoleName.STATE:
            await valkey.run(config.redis.url, stop, on_ready)
        case RoleName.ROUTER:
            from twostroke.router import service as router

            await router.run(config, stop, on_ready)
        case RoleName.PREFILL:
            from twostroke.prefill_worker import service as prefill

            await prefill.run(config, name, stop, lambda info: on_ready(_worker_record(info)))
        case RoleName.DECODE:
            from twostroke.decode_worker import service as decode

            await decode.run(config, name, stop, lambda info: on_ready(_worker_record(info)))


def _worker_record(info: "WorkerInfo") -> dict[str, Any]:
    return {
        "role": info.role.value,
        "incarnation": info.incarnation,
        "address": info.address,
        "model": info.model,
        "num_pages": info.num_pages,
        "weight_bytes": info.weight_bytes,
        "pool_bytes": info.num_pages * info.layout.page_bytes,
        "device": info.device,
    }


@app.command(hidden=True)
def ray_keeper(directory: Path, temporary: Path) -> None:
    """Keep a Ray of our own until SIGTERM; started by `up`."""
    from twostroke.cluster.control.ray_app import keep_ray

    keep_ray(ClusterFiles(directory), temporary)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
