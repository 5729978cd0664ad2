"""Commands that use a cluster: chat, model pull, demo."""

from pathlib import Path
from typing import Annotated

import typer

from twostroke.cluster.config import Config
from twostroke.cluster.control import lifecycle
from twostroke.cluster.control.client import stream_chat
from twostroke.cluster.control.commands_cluster import ClusterName
from twostroke.cluster.control.context import Context, console
from twostroke.cluster.control.models import pull_model
from twostroke.cluster.control.supervisor import MemberRole
from twostroke.cluster.core.errors import TwostrokeError, Unavailable

model_app = typer.Typer(name="model", help="Models on this machine.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.command()(chat)
    app.command()(demo)
    model_app.command()(pull)
    app.add_typer(model_app)


def chat(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="One question; without it: a conversation.")] = None,
    cluster: ClusterName = "local",
    url: Annotated[str, typer.Option(help="Address of a router; default: the running cluster's.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> None:
    """Talk to a running cluster; the answer appears as it is generated."""
    base_url = url or _router_url(context.obj, cluster)
    messages: list[dict[str, str]] = []

    def ask(question: str) -> None:
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in stream_chat(base_url, messages, max_tokens=max_tokens, temperature=temperature):
            typer.echo(chunk.text, nl=False)
            answer += chunk.text
        typer.echo("")
        messages.append({"role": "assistant", "content": answer})

    if prompt is not None:
        ask(prompt)
        return
    typer.echo("An empty line or Ctrl-D ends the conversation.")
    while question := _read_line():
        try:
            ask(question)
        except TwostrokeError as error:
            typer.echo(f"error: {error.message}", err=True)
            messages.pop()


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _router_url(ours: Context, cluster: str) -> str:
    record, files = ours.running(cluster)
    with lifecycle.connected(record, files, cluster) as client:
        views = client.status().views
    for view in views:
        if view.role == MemberRole.ROUTER.value and "http" in view.ready:
            return f"http://{view.ready['http']}"
    raise Unavailable("no router is ready; see: twostroke status")


def pull(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="`demo`, a hub id, a directory or a GGUF file.")],
) -> None:
    """Fetch a model, so that `up` finds it here."""
    ours: Context = context.obj
    out = console()
    with out.status(f"fetching {source}") as spinner:
        directory = pull_model(source, ours.models, spinner.update)
    out.print(str(directory), soft_wrap=True)


def demo(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration; default: the demo model, free ports.")] = None,
) -> None:
    """Start a whole cluster, ask it a question over HTTP and gRPC, show where the time went, and stop it."""
    from twostroke.cluster.control.demo import demo_config, run_demo

    ours: Context = context.obj
    settings = demo_config(Config() if config is None else ours.config(config))
    raise typer.Exit(run_demo(settings, ours))
