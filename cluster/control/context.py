"""What every command gets, and how an error becomes an exit code."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from twostroke.cluster.config import Config, load_config
from twostroke.cluster.control.launch import ClusterFiles, ClusterRecord
from twostroke.cluster.core.errors import ConfigError, TwostrokeError, Unavailable

EXIT_FAILED = 1
EXIT_USAGE = 2
PLAIN_WIDTH = 220


class ErrorsToExitCodes(TyperGroup):
    """Our own errors end a command with a message and a code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            typer.echo(error.message, err=True)
            raise typer.Exit(EXIT_USAGE) from None
        except TwostrokeError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(EXIT_FAILED) from None


@dataclass(frozen=True)
class Context:
    """`home` holds what outlives a command, `models` what was downloaded; `environment` is what children inherit."""

    home: Path
    models: Path
    environment: Mapping[str, str]

    def files(self, cluster: str) -> ClusterFiles:
        return ClusterFiles(self.home / cluster)

    def config(self, path: Path | None) -> Config:
        """Raises ConfigError with every mistake. Without a file: the defaults."""
        return load_config(path.absolute()) if path is not None else Config()

    def running(self, cluster: str) -> tuple[ClusterRecord, ClusterFiles]:
        """Raises Unavailable when `cluster` is not up."""
        files = self.files(cluster)
        record = files.read_record()
        if record is None:
            raise Unavailable(f"cluster {cluster!r} is not up (nothing in {files.directory}); start it: twostroke up")
        return record, files


def console() -> Console:
    """For tables and progress; plain, and wide enough not to fold, when it is not a terminal."""
    out = Console(file=sys.stdout)
    return out if out.is_terminal else Console(file=sys.stdout, width=PLAIN_WIDTH)
