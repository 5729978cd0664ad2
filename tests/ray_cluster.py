"""A cluster under Ray as a user has it, driven by the command line; and what its workers say of themselves.

cluster.command("scale", "--decode", "3")           one call of the CLI, from outside the repository
cluster.rows()["decode-1"]["state"]                 what `status --json` says
async with watching(cluster) as watch: ...          every load report of every worker that registers
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.children import child_environment
from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.attach import connect
from twostroke.cluster.config import load_config
from twostroke.cluster.control.launch import package_root
from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.core.ids import Incarnation, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import LoadReport, WorkerInfo, WorkerMessage
from twostroke.cluster.state.redis import RedisClient, RedisRegistry

COMMAND_TIMEOUT_S = 150.0
LOOK_S = 0.1


@dataclass
class RayCluster:
    directory: Path
    name: str

    def command(self, *arguments: str) -> str:
        """Output of one CLI call."""
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
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on(self, command: str, *arguments: str) -> str:
        return self.command(command, *arguments, "--cluster", self.name)

    def rows(self) -> dict[str, dict[str, Any]]:
        """`status` by worker id."""
        processes = json.loads(self.on("status", "--json"))["processes"]
        return {row["worker_id"]: row for row in processes}

    @asynccontextmanager
    async def states(self) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
        """What `status` shows as the state of each process, ten times a second; entered after the first look."""
        command = [sys.executable, str(Path(__file__).with_name("status_feed.py")), str(self.directory), self.name]
        process = await asyncio.create_subprocess_exec(
            *command, env=child_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        lines = process.stdout

        async def looks() -> AsyncIterator[dict[str, str]]:
            async for line in lines:
                yield json.loads(line)

        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                assert await lines.readline()
            yield looks()
        finally:
            process.terminate()
            await process.wait()

    @property
    def config_path(self) -> Path:
        return self.directory / self.name / "config.yaml"

    def processes(self) -> list[psutil.Process]:
        """Ray's keeper and all below it: actors, role processes, Valkey."""
        record = json.loads((self.directory / self.name / "cluster.json").read_text())
        keeper = psutil.Process(record["ray_pid"])
        return [keeper, *keeper.children(recursive=True)]

    def said(self, worker_id: str) -> dict[str, dict[str, Any]]:
        """The last log line of this worker's process for each event."""
        lines = (self.directory / self.name / "logs" / f"{worker_id}.log").read_text().splitlines()
        return {line["event"]: line for line in map(json.loads, lines)}

    def print_logs(self) -> None:
        for path in sorted((self.directory / self.name / "logs").glob("*.log")):
            print(f"---- {path.name}\n{path.read_bytes()[-6000:].decode(errors='replace')}")


@dataclass
class Watched:
    """One life of a worker, a `LinkListener`: its reports in order."""

    info: WorkerInfo
    loads: list[LoadReport] = field(default_factory=list)
    lost: bool = False

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        self.loads += [message for message in messages if isinstance(message, LoadReport)]

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.lost = True

    @property
    def jobs(self) -> int:
        """That it computes, keeps waiting, or has granted a lease to, now."""
        return jobs(self.loads[-1]) if self.loads else 0

    @property
    def since_drain(self) -> list[LoadReport]:
        return [load for load in self.loads if load.draining]


def jobs(load: LoadReport) -> int:
    return load.running + load.waiting + load.leases


class Watch:
    """Attached, as one more router, to every worker that is or was registered."""

    def __init__(self) -> None:
        self.workers: dict[Incarnation, Watched] = {}

    def of(self, worker_id: str) -> Watched:
        """The latest life of this worker."""
        return [worker for worker in self.workers.values() if worker.info.worker_id == worker_id][-1]

    def present(self) -> set[str]:
        return {worker.info.worker_id for worker in self.workers.values() if not worker.lost}

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110 - what workers report, which nobody signals
                    await asyncio.sleep(0.005)
        except TimeoutError:
            last = {worker.info.worker_id: worker.loads[-1:] for worker in self.workers.values()}
            raise AssertionError(f"it does not come to be; last loads: {last}") from None


@asynccontextmanager
async def watching(cluster: RayCluster) -> AsyncIterator[Watch]:
    config = load_config(cluster.config_path)
    client = RedisClient.from_config(config)
    registry = RedisRegistry(client, config.redis.registration_ttl_s)
    watch, links, tasks = Watch(), list[WorkerLink](), TaskOwner("watch")

    async def look() -> None:
        while True:
            # The lost ones too: this process may have stood still for so long that a worker gave it up.
            lost = [watched.info for watched in watch.workers.values() if watched.lost]
            for info in (*await registry.workers(), *lost):
                watched = watch.workers.get(info.incarnation, Watched(info))
                if info.incarnation in watch.workers and not watched.lost:
                    continue
                try:
                    link = await connect(info.address, new_incarnation(), watched)
                except TwostrokeError:
                    continue  # it has left; its entry expires
                links.append(link)
                if link.info.incarnation != info.incarnation:
                    link.close("another worker answers there now")
                    continue
                watched.lost = False
                watch.workers[info.incarnation] = watched
            await asyncio.sleep(LOOK_S)

    tasks.spawn(look(), "look")
    try:
        yield watch
    finally:
        await tasks.close()
        for link in links:
            link.close("the test has seen enough")
        await client.close()
