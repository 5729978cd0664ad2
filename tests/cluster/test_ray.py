"""A whole cluster under Ray, through the command line, with the fake model: up, serve, lose, scale, down."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from twostroke.cluster.control.launch import package_root

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.timeout(180)]

CONFIG = """
cluster: raytest
model: {fake: true}
pages: {num_pages: 64}
prefill: {replicas: 2}
decode: {replicas: 2}
router: {replicas: 0}
ray: {drain_s: 5, restart_backoff_s: 0.1}
"""
DEADLINE_S = 60.0


@dataclass
class Cluster:
    directory: Path

    def command(self, *arguments: str) -> str:
        """Output of one CLI call from outside the repository, as a user makes it."""
        done = subprocess.run(
            [sys.executable, "-m", "twostroke.cluster.main", *arguments],
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": package_root(),
                "PYTHONSAFEPATH": "1",
                "TWOSTROKE_HOME": str(self.directory),
            },
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def rows(self) -> dict[str, dict[str, str]]:
        """`status` as worker id -> its pid, incarnation, state and restarts."""
        found = {}
        for line in self.command("status", "--cluster", "raytest").splitlines():
            words = line.split()
            if len(words) >= 6 and words[0] in ("state", "decode", "prefill", "router"):
                found[words[1]] = dict(zip(("pid", "incarnation", "state", "restarts"), words[2:], strict=False))
        return found

    @property
    def record(self) -> dict[str, object]:
        record: dict[str, object] = json.loads((self.directory / "raytest" / "cluster.json").read_text())
        return record

    def processes(self) -> list[psutil.Process]:
        """Ray's keeper and all below it: actors, role processes, Valkey."""
        keeper = psutil.Process(int(str(self.record["ray_pid"])))
        return [keeper, *keeper.children(recursive=True)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("home"))
    (cluster.directory / "config.yaml").write_text(CONFIG)
    processes: list[psutil.Process] = []
    try:
        cluster.command("up", "--config", "config.yaml")
        processes = cluster.processes()
        yield cluster
        processes = cluster.processes()
    finally:
        cluster.command("down", "--cluster", "raytest")
        left = [process for process in processes if process.is_running()]
        for process in left:
            process.kill()
        assert left == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_every_process_has_a_pid_and_an_empty_ledger(cluster: Cluster) -> None:
    rows = cluster.rows()
    assert set(rows) == {"state-0", "decode-0", "decode-1", "prefill-0", "prefill-1"}
    assert len({row["pid"] for row in rows.values()}) == len(rows)
    assert all(row["state"] == "ready" for row in rows.values())
    assert cluster.command("status", "--cluster", "raytest").count("64/0/0/0/0") == 4


def test_a_killed_worker_is_replaced_under_its_id_as_a_new_incarnation(cluster: Cluster) -> None:
    before = cluster.rows()["decode-0"]
    os.kill(int(before["pid"]), signal.SIGKILL)
    until(lambda: (row := cluster.rows()["decode-0"])["state"] == "ready" and row["restarts"] == "1")
    after = cluster.rows()["decode-0"]
    assert after["pid"] != before["pid"]
    assert after["incarnation"] != before["incarnation"]
    assert "killed by SIGKILL" in cluster.command("status", "--cluster", "raytest")


def test_pools_scale_apart_and_a_drained_worker_is_not_replaced(cluster: Cluster) -> None:
    cluster.command("scale", "--prefill", "1", "--decode", "3", "--cluster", "raytest")
    assert set(cluster.rows()) == {"state-0", "decode-0", "decode-1", "decode-2", "prefill-0"}
    cluster.command("drain", "decode-1", "--cluster", "raytest")
    until(lambda: set(cluster.rows()) == {"state-0", "decode-0", "decode-2", "prefill-0"})


def test_a_lost_supervisor_harms_nothing_and_adopts_what_it_finds(cluster: Cluster) -> None:
    before = cluster.rows()
    supervisor = next(process for process in cluster.processes() if "Supervisor" in " ".join(process.cmdline()))
    supervisor.kill()
    until(lambda: cluster.rows() == before)
