"""A whole cluster under Ray, through the command line, with the fake model: up, serve, lose, scale, down."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from random import Random
from typing import NamedTuple

import grpc.aio
import psutil
import pytest

from tests.process_cluster import expected, request
from tests.ray_cluster import RayCluster, jobs, watching
from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.control.client import stream_chat
from twostroke.cluster.wire.channel import open_channel
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.timeout(300)]

CONFIG = """
cluster: raytest
model: {fake: true, name: fake, fake_step_ms: 20}
pages: {num_pages: 1024}
prefill: {replicas: 2, chunk_tokens: 16}
decode: {replicas: 2}
transfer: {transports: [grpc]}
router: {http_port: 0, grpc_port: 0, policy: {max_queued_chunks: 32}}
ray: {drain_s: 30, restart_backoff_s: 0.1}
"""
DEADLINE_S = 60.0
CLIENTS = 28
"""More than the two prefill workers can serve at once, so that all workers are at work whenever a drain begins."""


class Up(NamedTuple):
    cluster: RayCluster
    url: str
    grpc: str


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    cluster = RayCluster(tmp_path_factory.mktemp("home"), "raytest")
    (cluster.directory / "config.yaml").write_text(CONFIG)
    processes: list[psutil.Process] = []
    try:
        output = cluster.command("up", "--config", "config.yaml")
        processes = cluster.processes()
        words = output.split()
        url = next(word for word in words if word.startswith("http://")).removesuffix("/v1")
        yield Up(cluster, url, words[words.index("grpc") + 1])
        processes = cluster.processes()
    finally:
        cluster.print_logs()
        cluster.on("down")
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


def test_a_request_is_answered_by_processes_with_a_pid_each(up: Up) -> None:
    rows = up.cluster.rows()
    assert set(rows) == {"state-0", "decode-0", "decode-1", "prefill-0", "prefill-1", "router-0"}
    assert len({row["pid"] for row in rows.values()}) == len(rows)
    assert all(row["state"] == "ready" for row in rows.values())
    assert all(row["rss_bytes"] < row["limit_bytes"] for row in rows.values() if row["limit_bytes"] is not None)
    assert "decode-1" in up.cluster.on("status")
    assert answer(up.url) == answer(up.url)


def test_a_killed_worker_is_replaced_as_a_new_incarnation_and_serves(up: Up) -> None:
    expected_text = answer(up.url)
    before = up.cluster.rows()["decode-0"]
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: (row := up.cluster.rows()["decode-0"])["state"] == "ready" and row["restarts"] == 1)
    after = up.cluster.rows()["decode-0"]
    assert after["pid"] != before["pid"]
    assert after["ready"]["incarnation"] != before["ready"]["incarnation"]

    up.cluster.on("drain", "decode-1")  # so that only the new one can serve
    until(lambda: "decode-1" not in up.cluster.rows())
    assert answer(up.url) == expected_text


class Load:
    """Clients of the gRPC API; every answer must be golden."""

    def __init__(self, stub: InferenceStub) -> None:
        self._stub = stub
        self.tasks = TaskOwner("load")
        self.ended: Counter[str] = Counter()
        self.stop = False

    async def _ask(self, random: Random) -> None:
        max_tokens = random.randint(60, 200)
        prompt = [random.randrange(256) for _ in range(random.randint(300, 600))]
        tokens: list[int] = []
        try:
            async for item in self._stub.Generate(request(prompt, max_tokens), timeout=DEADLINE_S):
                tokens.extend(item.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            self.ended[f"{error.code().name}: {error.details()}"] += 1
            return
        self.ended["golden" if tokens == expected(prompt, max_tokens) else "wrong"] += 1

    async def _client(self, seed: int) -> None:
        random = Random(seed)
        while not self.stop:
            await self._ask(random)

    def start_clients(self) -> list[asyncio.Task[None]]:
        return [self.tasks.spawn(self._client(seed), f"client-{seed}") for seed in range(CLIENTS)]


async def until_gone(states: AsyncIterator[dict[str, str]], names: list[str]) -> dict[str, set[str]]:
    """All states that each process is seen in until none of `names` is there."""
    seen: dict[str, set[str]] = {}
    async for look in states:
        for name, state in look.items():
            seen.setdefault(name, set()).add(state)
        if not set(names) & set(look):
            return seen
    raise AssertionError(f"status ended: {seen}")


async def test_pools_scale_apart_under_load_and_no_request_fails(up: Up) -> None:
    """Line 5 of the first issue: 1+1 -> 2+3 -> 1+1 while clients ask. What drains was at work, and finishes it."""
    cluster = up.cluster
    await asyncio.to_thread(cluster.on, "scale", "--prefill", "1", "--decode", "1")
    async with open_channel(up.grpc) as channel, watching(cluster) as watch:
        load = Load(InferenceStub(channel))  # type: ignore[no-untyped-call]
        clients = load.start_clients()

        # 1. Workers start under load, and get their part of it.
        await asyncio.to_thread(cluster.on, "scale", "--prefill", "2", "--decode", "3")
        leaving = ["prefill-1", "decode-1", "decode-2"]
        await watch.until(lambda: set(leaving) <= watch.present() and all(watch.of(name).jobs for name in leaving))
        rows = await asyncio.to_thread(cluster.rows)
        assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(
            ["state-0", "router-0", "prefill-0", "decode-0", *leaving], "ready"
        )

        # 2. They drain under load: `status` says so, and each was at work when its drain began.
        async with cluster.states() as states:
            following = load.tasks.spawn(until_gone(states, leaving), "status")
            await asyncio.to_thread(cluster.on, "scale", "--prefill", "1", "--decode", "1")
            seen = await following
        # `stopped` is there for a moment, until the supervisor's next look: some runs see it.
        assert all(seen[name] - {"stopped"} == {"ready", "draining"} for name in leaving), seen
        assert all(seen[name] == {"ready"} for name in ("state-0", "router-0", "prefill-0", "decode-0")), seen
        for name in leaving:
            begun = cluster.said(name)["worker_draining"]
            assert begun["running"] + begun["waiting"] + begun["leases"] > 0, begun
            assert cluster.said(name)["worker_drained"]["timestamp"] > begun["timestamp"]  # at rest by its own books
            reports = [jobs(report) for report in watch.of(name).since_drain]
            assert all(later <= earlier for earlier, later in pairwise(reports)), (name, reports)  # nothing new
            assert not psutil.pid_exists(rows[name]["pid"]), name

        # 3. All answers came and are golden, and what stays has nothing left over.
        load.stop = True
        await asyncio.gather(*clients)
        assert set(load.ended) == {"golden"}
        assert load.ended["golden"] > 2 * CLIENTS
        await watch.until(lambda: all(watch.of(name).loads[-1].ledger.at_rest for name in ("prefill-0", "decode-0")))


def test_a_lost_supervisor_harms_nothing_and_adopts_what_it_finds(up: Up) -> None:
    def processes() -> dict[str, tuple[int, str]]:
        return {name: (row["pid"], row["state"]) for name, row in up.cluster.rows().items()}

    until(lambda: {state for _, state in processes().values()} == {"ready"})  # the drain of the last test has ended
    before = processes()
    supervisor = next(process for process in up.cluster.processes() if "Supervisor" in " ".join(process.cmdline()))
    supervisor.kill()
    assert answer(up.url)
    until(lambda: processes() == before)
    psutil.wait_procs([supervisor], timeout=DEADLINE_S)
    assert processes() == before  # adopted, not about to be drained
