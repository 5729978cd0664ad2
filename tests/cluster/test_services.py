"""Both roles' services as `twostroke run` starts them: gRPC attach and transfer, health, metrics, registry, drain."""

import asyncio
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from tests.children import child_environment
from tests.transfer_builders import make_lease
from tests.waiting import until
from twostroke.cluster.attach import AttachedLink, connect, describe, fetch_snapshot
from twostroke.cluster.config import FAKE_VOCAB_SIZE, Config, parse_config
from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.ids import JobId, RequestId, WorkerId, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import Ended, Leased, Outcome, Role, Stroke, Submit, Tokens, WorkerInfo
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.cluster.wire.channel import open_channel
from twostroke.decode_worker import service as decode_service
from twostroke.engine.fake_executor import golden
from twostroke.prefill_worker import service as prefill_service

CONFIG = parse_config(
    {
        "model": {"fake": True, "name": "fake"},
        "pages": {"page_size": 4, "num_pages": 256},
        "prefill": {"chunk_tokens": 16},
        "transfer": {"transports": ["grpc"]},
        "ray": {"drain_s": 5},
    }
)


class Running:
    """A service in this process."""

    def __init__(self, role: Role, config: Config) -> None:
        self.stop = asyncio.Event()
        self._ready: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        service = prefill_service if role is Role.PREFILL else decode_service
        name = WorkerId(f"{role.value}-0")
        self.task = asyncio.create_task(service.run(config, name, self.stop, self._ready.set_result))

    async def ready(self) -> WorkerInfo:
        await asyncio.wait([self._ready, self.task], timeout=20, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        return self._ready.result()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def running(role: Role, config: Config = CONFIG) -> AsyncIterator[tuple[Running, WorkerInfo]]:
    service = Running(role, config)
    info = await service.ready()
    yield service, info
    await service.end()


class Listener:
    def __init__(self) -> None:
        self.messages: list[object] = []
        self.losses: list[str] = []

    def on_messages(self, link: WorkerLink, messages: Sequence[object]) -> None:
        self.messages.extend(messages)

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.losses.append(reason)

    def first(self, kind: type) -> object:
        return next((message for message in self.messages if isinstance(message, kind)), None)

    @property
    def tokens(self) -> list[int]:
        runs = [run for message in self.messages if isinstance(message, Tokens) for run in message.runs]
        return [token for run in sorted(runs, key=lambda run: run.first_index) for token in run.tokens]


async def attach(stack: AsyncExitStack, info: WorkerInfo) -> tuple[AttachedLink, Listener]:
    listener = Listener()
    link = await connect(info.address, new_incarnation(), listener)

    async def close() -> None:
        link.close("the test is over")
        await link.wait_closed()

    stack.push_async_callback(close)
    return link, listener


def submit(prompt: tuple[int, ...], num_tokens: int, stroke: Stroke) -> Submit:
    return Submit(JobId(RequestId("r"), 0, 0), stroke, prompt, (), SamplingParams(max_tokens=num_tokens), 30.0)


def over(*transports: str, max_groups: int = 16) -> Config:
    transfer = CONFIG.transfer.model_copy(update={"transports": transports, "max_groups": max_groups})
    return CONFIG.model_copy(update={"transfer": transfer})


@pytest.mark.parametrize(
    ("config", "occupied", "expected"),
    [
        pytest.param(over("grpc"), False, "grpc", id="grpc"),
        pytest.param(over("collective", "grpc"), False, "collective", id="collective"),
        pytest.param(over("collective", "grpc", max_groups=1), True, "grpc", id="no group left"),
    ],
)
async def test_a_pair_of_services_serves_a_request(config: Config, occupied: bool, expected: str) -> None:
    async with AsyncExitStack() as stack:
        _, decode = await stack.enter_async_context(running(Role.DECODE, config))
        _, prefill = await stack.enter_async_context(running(Role.PREFILL, config))
        assert decode.transports == config.transfer.transports
        if occupied:
            await occupy_a_group(stack, decode)
        to_decode, heard_decode = await attach(stack, decode)
        to_prefill, heard_prefill = await attach(stack, prefill)
        request = submit(tuple(range(100)), 20, Stroke.RESERVE)
        to_decode.send([request])
        await until(lambda: heard_decode.first(Leased) is not None)
        leased = heard_decode.first(Leased)
        assert isinstance(leased, Leased)
        to_prefill.send([replace(request, stroke=Stroke.PREFILL, lease=leased.lease)])
        await until(lambda: heard_decode.first(Ended) is not None and heard_prefill.first(Ended) is not None)

        end = heard_prefill.first(Ended)
        assert isinstance(end, Ended)
        assert (end.outcome, end.timings.transport, end.timings.pages_shipped) == (Outcome.HANDED_OVER, expected, 25)
        tokens = heard_prefill.tokens + heard_decode.tokens
        assert tokens == golden(request.prompt, 20, FAKE_VOCAB_SIZE)
        snapshot = await fetch_snapshot(decode.address)
        assert snapshot.incarnation == decode.incarnation
        assert len(snapshot.keys) >= 25


async def occupy_a_group(stack: AsyncExitStack, decode: WorkerInfo) -> None:
    from twostroke.cluster.transport.collective import CollectiveTransport

    transport = CollectiveTransport(BytePages(decode.layout, 1), new_incarnation(), host="127.0.0.1")
    stack.push_async_callback(transport.close)
    lease = make_lease([], layout=decode.layout, address=decode.address, incarnation=decode.incarnation)
    await transport.open(lease)


async def test_health_description_and_metrics() -> None:
    with capture_logs() as logs:
        async with running(Role.DECODE) as (_, info):
            assert await describe(info.address) == info
            async with open_channel(info.address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            port = next(entry["metrics_port"] for entry in logs if entry["event"] == "worker_ready")
            free = 'twostroke_kv_pages{engine="decode-0",model_name="fake",state="free"} 256.0'
            assert free in await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")


def _get(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
        return str(answer.read().decode())


async def test_stop_drains_what_runs_and_tells_the_end() -> None:
    async with AsyncExitStack() as stack:
        service = Running(Role.DECODE, CONFIG)
        info = await service.ready()
        link, heard = await attach(stack, info)
        request = submit(tuple(range(50)), 400, Stroke.LOCAL)
        link.send([request])
        await until(lambda: len(heard.tokens) > 2)
        await service.end()
        await until(lambda: bool(heard.losses))
        end = heard.first(Ended)
        assert isinstance(end, Ended)
        assert end.outcome is Outcome.FINISHED
        assert heard.tokens == golden(request.prompt, 400, FAKE_VOCAB_SIZE)


async def test_a_worker_that_listens_everywhere_tells_its_own_address() -> None:
    changes = {"worker": {"host": "0.0.0.0"}, "redis": {"url": "redis://127.0.0.1:1/0"}}
    async with running(Role.DECODE, parse_config({**CONFIG.model_dump(), **changes})) as (_, info):
        assert info.address.startswith("127.0.0.1:")
        assert await describe(info.address) == info


async def test_an_unreachable_redis_stops_nothing() -> None:
    config = CONFIG.model_copy(update={"redis": CONFIG.redis.model_copy(update={"url": "redis://127.0.0.1:1/0"})})
    async with running(Role.DECODE, config) as (_, info), AsyncExitStack() as stack:
        link, heard = await attach(stack, info)
        request = submit(tuple(range(50)), 20, Stroke.LOCAL)
        link.send([request])
        await until(lambda: heard.first(Ended) is not None)
        assert heard.tokens == golden(request.prompt, 20, FAKE_VOCAB_SIZE)


async def test_fake_services_need_no_torch() -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.cluster.test_services import CONFIG, running\n"
        "from twostroke.cluster.core.messages import Role\n"
        "async def main():\n"
        "    async with running(Role.DECODE), running(Role.PREFILL):\n"
        "        return int('torch' in sys.modules)\n"
        "sys.exit(asyncio.run(main()))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=child_environment())
    assert await asyncio.wait_for(process.wait(), 60) == 0
