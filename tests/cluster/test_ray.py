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

from twostroke.cluster.control.client import stream_chat
from twostroke.cluster.control.launch import package_root

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.timeout(180)]

CONFIG = """
cluster: raytest
model: {fake: true}
pages: {num_pages: 64}
prefill: {replicas: 2}
decode: {replicas: 2}
router: {http_port: 0, grpc_port: 0}
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    cluster = Cluster(tmp_path_factory.mktemp("home"))
    (cluster.directory / "config.yaml").write_text(CONFIG)
    processes: list[psutil.Process] = []
    try:
        output = cluster.command("up", "--config", "config.yaml")
        processes = cluster.processes()
        url = next(word for word in output.split() if word.startswith("http://")).removesuffix("/v1")
        yield cluster, url
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


def answer(url: str) -> str:
    chunks = stream_chat(url, [{"role": "user", "content": "hello " * 40}], max_tokens=8)
    return "".join(chunk.text for chunk in chunks)


def test_a_request_is_answered_by_processes_with_a_pid_each(cluster: tuple[Cluster, str]) -> None:
    under_ray, url = cluster
    rows = under_ray.rows()
    assert set(rows) == {"state-0", "decode-0", "decode-1", "prefill-0", "prefill-1", "router-0"}
    assert len({row["pid"] for row in rows.values()}) == len(rows)
    assert all(row["state"] == "ready" for row in rows.values())
    assert answer(url) == answer(url)


def test_a_killed_worker_is_replaced_as_a_new_incarnation_and_serves(cluster: tuple[Cluster, str]) -> None:
    under_ray, url = cluster
    expected = answer(url)
    before = under_ray.rows()["decode-0"]
    os.kill(int(before["pid"]), signal.SIGKILL)
    until(lambda: (row := under_ray.rows()["decode-0"])["state"] == "ready" and row["restarts"] == "1")
    after = under_ray.rows()["decode-0"]
    assert after["pid"] != before["pid"]
    assert after["incarnation"] != before["incarnation"]

    under_ray.command("drain", "decode-1", "--cluster", "raytest")  # so that only the new one can serve
    until(lambda: "decode-1" not in under_ray.rows())
    assert answer(url) == expected


def test_pools_scale_apart(cluster: tuple[Cluster, str]) -> None:
    under_ray, url = cluster
    under_ray.command("scale", "--prefill", "1", "--decode", "2", "--cluster", "raytest")
    assert set(under_ray.rows()) == {"state-0", "decode-0", "decode-1", "prefill-0", "router-0"}
    assert answer(url)


def test_a_lost_supervisor_harms_nothing_and_adopts_what_it_finds(cluster: tuple[Cluster, str]) -> None:
    under_ray, url = cluster

    def processes() -> dict[str, tuple[str, str]]:
        return {name: (row["pid"], row["state"]) for name, row in under_ray.rows().items()}

    until(lambda: {state for _, state in processes().values()} == {"ready"})  # the drain of the last test has ended
    before = processes()
    supervisor = next(process for process in under_ray.processes() if "Supervisor" in " ".join(process.cmdline()))
    supervisor.kill()
    assert answer(url)
    until(lambda: processes() == before)
