"""A cluster of real processes, as `twostroke run` starts them, around the fake model and a real Valkey.

    async with process_cluster(tmp_path, 2, 2) as cluster:
        answer = await cluster.ask(PROMPT, 20)               # over gRPC, as a client does
        cluster.kill("decode-0")
        await cluster.start("decode-0")                      # the same worker id, a new incarnation
        await cluster.at_rest()

A child's parent pipe ends with this process, so that none outlives a test. Logs are printed when a test fails.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.children import child_environment
from tests.redis_server import RedisServer
from twostroke.cluster.attach import check, connect
from twostroke.cluster.config import FAKE_VOCAB_SIZE
from twostroke.cluster.core.ids import new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import LoadReport, WorkerCheck, WorkerMessage
from twostroke.cluster.core.random import choice_seed
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.status import from_rpc
from twostroke.engine.fake_executor import golden
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub

READY_S = 60.0
LOG_TAIL_BYTES = 6000


@dataclass
class Answer:
    """`error` is the call's status; None when it ended well."""

    tokens: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: grpc.StatusCode | None = None
    message: str = ""
    reason: str = ""
    """The stable code of our own errors."""
    duration_s: float = 0.0


def request(prompt: Sequence[int], max_tokens: int, **params: Any) -> pb.GenerateRequest:
    """Greedy unless told otherwise; an end token does not end it."""
    settings = {"model": "fake", "temperature": 0.0, "ignore_eos": True, **params}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_tokens=max_tokens, **settings)


def expected(prompt: Sequence[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    params = SamplingParams(max_tokens, choice_seed(seed, 0), temperature)
    return golden(prompt, max_tokens, FAKE_VOCAB_SIZE, params)


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    ready: dict[str, Any]


class Watch:
    """A `LinkListener` that keeps the last load report of one worker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.load: LoadReport | None = None
        self._news = asyncio.Event()

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            if isinstance(message, LoadReport):
                self.load = message
                self._news.set()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self._news.set()

    async def until(self, condition: Callable[[LoadReport], bool], timeout_s: float = 30.0) -> LoadReport:
        """The first report that fulfils it, from now on; the caller goes on in the turn of the loop that brought it."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._news.clear()
                    await self._news.wait()
                    if self.load is not None and condition(self.load):
                        return self.load
        except TimeoutError:
            raise AssertionError(f"{self.name} did not come to what was waited for: {self.load}") from None


class ProcessCluster:
    """Made by `process_cluster`. Names are `prefill-0`, `decode-1`, `router`."""

    def __init__(self, directory: Path, redis: RedisServer, config: dict[str, Any]) -> None:
        self.redis = redis
        self._directory = directory
        self._num_pages: int = config["pages"]["num_pages"]
        self._config_path = directory / "cluster.yaml"
        self._config_path.write_text(yaml.safe_dump(config))
        self._children: dict[str, _Child] = {}
        self._channel: grpc.aio.Channel | None = None
        self._http: httpx.AsyncClient | None = None

    @property
    def http(self) -> httpx.AsyncClient:
        """Of the router."""
        if self._http is None:
            address = self._children["router"].ready["http"]
            limits = httpx.Limits(max_connections=None)
            self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=60, limits=limits, trust_env=False)
        return self._http

    @property
    def stub(self) -> InferenceStub:
        if self._channel is None:
            self._channel = open_channel(self.address("router"))
        return InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    def address(self, name: str) -> str:
        ready = self._children[name].ready
        return str(ready["grpc"] if name == "router" else ready["address"])

    def incarnation(self, name: str) -> str:
        return str(self._children[name].ready["incarnation"])

    @property
    def workers(self) -> list[str]:
        return [name for name in self._children if name != "router"]

    async def start(self, name: str) -> None:
        """Start the process, or its next life, and wait for its ready line."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "twostroke.cluster.main", "run", name.split("-")[0]]
        command += ["--config", str(self._config_path), "--worker-id", name, "--parent-pipe", str(theirs.fileno())]
        with theirs, (self._directory / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - forks and returns; its pid and wait are wanted
                command,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        child = self._children[name] = _Child(process, ours, {})
        ours.setblocking(False)
        line = b""
        async with asyncio.timeout(READY_S):
            while not line.endswith(b"\n"):
                part = await asyncio.get_running_loop().sock_recv(ours, 4096)
                if not part:
                    raise RuntimeError(f"{name} ended before it was ready")
                line += part
        child.ready = json.loads(line)
        if name == "router":
            await self._drop_clients()

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process itself, not to a keeper. Of a killed one nothing is left afterwards."""
        os.kill(self.pid(name), number)
        if number is signal.SIGKILL:
            child = self._children[name]
            child.process.wait(10)
            child.pipe.close()

    async def model_info(self) -> pb.ModelInfo:
        return await self.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)

    async def until_workers(self, prefill: int, decode: int, timeout_s: float = 30.0) -> None:
        """Until the router is attached to so many."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    info = await self.model_info()
                    if (info.num_prefill_workers, info.num_decode_workers) == (prefill, decode):
                        return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.1)

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        leave_after: int | None = None,
        timeout_s: float = 60.0,
        **params: Any,
    ) -> Answer:
        """Stream one answer; with `leave_after` the client goes after so many tokens (0: once accepted)."""
        answer, clock = Answer(), asyncio.get_running_loop().time
        begin = clock()
        call = self.stub.Generate(request(prompt, max_tokens, **params), timeout=timeout_s)
        try:
            async for item in call:
                answer.tokens.extend(item.delta.token_ids)
                if item.HasField("finished"):
                    answer.finished = item.finished
                if leave_after is not None and len(answer.tokens) >= leave_after:
                    break
        except grpc.aio.AioRpcError as error:
            answer.error, answer.message, answer.reason = error.code(), error.details() or "", from_rpc(error).code
        finally:
            call.cancel()
        answer.duration_s = clock() - begin
        return answer

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the router's samples with these labels."""
        answer = await self.http.get("/metrics", timeout=10)
        return sum(
            sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == f"twostroke_{name}" and labels.items() <= sample.labels.items()
        )

    async def until_metric(self, name: str, least: float, timeout_s: float = 30.0, **labels: str) -> None:
        """Until the router counts at least so much."""
        value = 0.0
        try:
            async with asyncio.timeout(timeout_s):
                while (value := await self.metric(name, **labels)) < least:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name} {labels} is {value}, not {least}") from None

    def request_lines(self) -> list[dict[str, Any]]:
        """The router's log lines about requests, of all of its lives."""
        lines = (self._directory / "router.log").read_text(errors="replace").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if record.get("event") == "request"]

    @asynccontextmanager
    async def watching(self, name: str) -> AsyncIterator[Watch]:
        """Attached to a worker as one more router that submits nothing."""
        watch = Watch(name)
        link = await connect(self.address(name), new_incarnation(), watch)
        try:
            yield watch
        finally:
            link.close("enough was seen")
            await link.wait_closed()

    async def at_rest(self, *names: str, timeout_s: float = 15.0) -> None:
        """Until the named workers (default: all) hold nothing for anybody; their books agree, and they serve."""
        await asyncio.gather(*(self._at_rest(name, timeout_s) for name in names or self.workers))

    async def _at_rest(self, name: str, timeout_s: float) -> None:
        seen: WorkerCheck | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while not (seen := await check(self.address(name))).at_rest:
                    assert not seen.fault, f"{name}: {seen}"
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{name} does not come to rest: {seen}") from None
        assert seen.load.ledger.total == self._num_pages, seen
        async with open_channel(self.address(name)) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING, name

    async def at_work(self, name: str) -> None:
        """Until jobs run on this worker."""
        async with self.watching(name) as watch:
            await watch.until(lambda load: load.running > 0)

    async def leave(self, name: str) -> int:
        """SIGTERM, then wait for its end; returns the exit code."""
        self.signal(name, signal.SIGTERM)
        return await asyncio.to_thread(self._children[name].process.wait, 30)

    async def close(self) -> None:
        await self._drop_clients()
        for child in self._children.values():
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait(10)
            child.pipe.close()

    async def _drop_clients(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def print_logs(self) -> None:
        for path in sorted(self._directory.glob("*.log")):
            print(f"---- {path.name}\n{path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors='replace')}")


@asynccontextmanager
async def process_cluster(
    directory: Path, num_prefill: int = 1, num_decode: int = 1, **sections: dict[str, Any]
) -> AsyncIterator[ProcessCluster]:
    """`sections` are merged into the configuration, section by section."""
    redis = RedisServer(directory)
    redis.start()
    config: dict[str, Any] = {
        "model": {"fake": True, "name": "fake"},
        "pages": {"page_size": 4, "num_pages": 2048},
        "prefill": {"chunk_tokens": 64},
        "transfer": {"transports": ["grpc"]},
        "router": {"http_port": 0, "grpc_port": 0},
        "redis": {"url": redis.url, "registration_ttl_s": 3},
        "ray": {"drain_s": 5},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    cluster = ProcessCluster(directory, redis, config)
    try:
        names = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
        await asyncio.gather(*(cluster.start(name) for name in [*names, "router"]))
        await cluster.until_workers(num_prefill, num_decode)
        yield cluster
    except BaseException:
        cluster.print_logs()
        raise
    finally:
        await cluster.close()
        redis.stop()
