"""No hop of a token waits for a delayed acknowledgement: TCP_NODELAY on every connection of routers and workers."""

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.redis_server import redis_server
from twostroke.client.grpc import GrpcClient
from twostroke.client.http import HttpClient
from twostroke.client.types import Sampling
from twostroke.cluster.config import parse_config
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.decode_worker import service as decode_service
from twostroke.prefill_worker import service as prefill_service
from twostroke.router import service as router_service


class Connection(NamedTuple):
    local_port: int
    remote_port: int
    no_delay: bool


def connections() -> list[Connection]:
    """All TCP connections of this process, both ends of those within it."""
    return [found for name in os.listdir("/proc/self/fd") if (found := _connection(name)) is not None]


def _connection(descriptor: str) -> Connection | None:
    """None for what is closed by now, no TCP socket, or only listens."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(int(descriptor))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return None
            no_delay = bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return Connection(one.getsockname()[1], one.getpeername()[1], no_delay)
    except OSError:
        return None


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


async def test_no_connection_delays_small_writes(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    with redis_server(tmp_path) as redis:
        config = parse_config(
            {
                "model": {"fake": True, "name": "fake", "fake_step_ms": 20},
                "pages": {"page_size": 4, "num_pages": 256},
                "transfer": {"transports": ["grpc"]},
                "router": {
                    "http_port": 0,
                    "grpc_port": 0,
                    "policy": {"local_threshold_tokens": 0, "local_when_no_prefill": False},
                },
                "redis": {"url": redis.url},
                "ray": {"drain_s": 1},
            }
        )
        stop = asyncio.Event()
        prefill: asyncio.Future[WorkerInfo] = loop.create_future()
        decode: asyncio.Future[WorkerInfo] = loop.create_future()
        router: asyncio.Future[Mapping[str, str]] = loop.create_future()
        services = [
            asyncio.create_task(prefill_service.run(config, WorkerId("prefill-0"), stop, prefill.set_result)),
            asyncio.create_task(decode_service.run(config, WorkerId("decode-0"), stop, decode.set_result)),
            asyncio.create_task(router_service.run(config, stop, router.set_result)),
        ]
        try:
            async with asyncio.timeout(60):
                ports = {
                    "prefill worker": port_of((await prefill).address),
                    "decode worker": port_of((await decode).address),
                    "HTTP": port_of((await router)["http"]),
                    "gRPC": port_of((await router)["grpc"]),
                    "Redis": redis.port,
                }
                found = await while_streaming(ports["HTTP"], ports["gRPC"])
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*services), 30)
    for name, port in ports.items():
        assert any(port == one.remote_port for one in found), f"nobody is connected to the {name} port"
        assert name == "Redis" or any(port == one.local_port for one in found), f"{name} has accepted nobody"
    delayed = [one for one in found if not one.no_delay]
    assert not delayed, (ports, delayed)


async def while_streaming(http_port: int, grpc_port: int) -> list[Connection]:
    """The connections while our clients read tokens over HTTP and gRPC that a pair of workers makes."""
    http_client, grpc_client = HttpClient(f"http://127.0.0.1:{http_port}"), GrpcClient(f"127.0.0.1:{grpc_port}")
    async with http_client, grpc_client:
        while not await is_ready(http_port):  # noqa: ASYNC110 - a router that is not ready tells nobody when it will be
            await asyncio.sleep(0.02)
        long, short = Sampling(max_tokens=150, ignore_eos=True), Sampling(max_tokens=4, ignore_eos=True)
        found: list[Connection] = []
        async with (
            http_client.stream(range(1, 10), long) as over_http,
            grpc_client.stream(range(10, 20), short) as other,
        ):
            await anext(aiter(over_http))
            async for _ in other:
                found = connections()
        return found


async def is_ready(http_port: int) -> bool:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{http_port}/health/ready")).status_code == 200
