"""The command line: arguments, configuration mistakes, exit codes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from twostroke import __version__
from twostroke.cluster.config import Config
from twostroke.cluster.control.commands_cluster import with_sizes
from twostroke.cluster.main import app


@pytest.fixture
def runner(tmp_path: Path) -> CliRunner:
    return CliRunner(env={"TWOSTROKE_HOME": str(tmp_path / "home")})


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"twostroke {__version__}\n")


@pytest.mark.parametrize("command", [["up"], ["run", "decode"]])
def test_all_mistakes_of_a_configuration_are_told_at_once(
    runner: CliRunner, tmp_path: Path, command: list[str]
) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("cluster: Bad_Name\nprefill: {replicas: -1}\ntransfer: {transports: [pigeon]}\nsurprise: 1\n")
    result = runner.invoke(app, [*command, "--config", str(config)])
    assert result.exit_code == 2
    for path in ("cluster:", "prefill.replicas:", "transfer.transports.0:", "surprise:"):
        assert path in result.output
    assert "Traceback" not in result.output


def test_a_missing_configuration_is_a_mistake(runner: CliRunner) -> None:
    result = runner.invoke(app, ["up", "--config", "/nowhere/config.yaml"])
    assert result.exit_code == 2
    assert "/nowhere/config.yaml" in result.output


@pytest.mark.parametrize("command", [["status"], ["scale", "--decode", "2"], ["drain", "decode-0"], ["chat", "hello"]])
def test_commands_say_that_nothing_is_up(runner: CliRunner, command: list[str]) -> None:
    result = runner.invoke(app, command)
    assert result.exit_code == 1
    assert "cluster 'local' is not up" in result.output


def test_down_of_nothing_is_no_failure(runner: CliRunner) -> None:
    result = runner.invoke(app, ["down"])
    assert result.exit_code == 0
    assert "was not up" in result.output


def test_scale_needs_a_number(runner: CliRunner) -> None:
    result = runner.invoke(app, ["scale"])
    assert result.exit_code == 1
    assert "--prefill" in result.output


def test_sizes_override_the_configuration() -> None:
    config = with_sizes(Config(), prefill=3, decode=None)
    assert (config.prefill.replicas, config.decode.replicas) == (3, Config().decode.replicas)
