"""Routers' two faces over the fake generator, each with our own client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from tests.gateway_server import gateway
from twostroke.client.calls import Caller
from twostroke.client.grpc import GrpcClient
from twostroke.client.http import HttpClient
from twostroke.client.retry import RetryPolicy
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.proto.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from twostroke.router.fake_generator import FakeGenerator
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.request import Generator
from twostroke.router.tokenizer import ByteTokenizer, Tokenizer

WIRES = ("http", "grpc")
Client = HttpClient | GrpcClient


@dataclass
class Waits:
    """Stands for `asyncio.sleep` between attempts: notes how long, and does not wait."""

    taken: list[float] = field(default_factory=list)

    async def __call__(self, delay_s: float) -> None:
        self.taken.append(delay_s)

    def caller(self, policy: RetryPolicy | None = None) -> Caller:
        return Caller(policy or RetryPolicy(), self)


def client_of(wire: str, address: str, caller: Caller | None = None) -> Client:
    return HttpClient(f"http://{address}", caller=caller) if wire == "http" else GrpcClient(address, caller=caller)


@asynccontextmanager
async def grpc_serving(
    generator: Generator, tokenizer: Tokenizer, config: RouterSection | None = None
) -> AsyncIterator[str]:
    """The address of the gRPC API."""
    metrics = RouterMetrics(CollectorRegistry(), "fake")
    server, gate = new_server(), GrammarGate()
    servicer = InferenceServicer(generator, tokenizer, config or RouterSection(), metrics, gate)
    add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(1.0)
        await gate.close()


@asynccontextmanager
async def grpc_api(
    config: RouterSection | None = None, tokenizer: Tokenizer | None = None, **fields: Any
) -> AsyncIterator[tuple[FakeGenerator, str]]:
    """The generator, which gets `fields`, and the address. Leaving the context checks that no request is live."""
    tokenizer = tokenizer or ByteTokenizer()
    generator = FakeGenerator(tokenizer, **fields)
    async with grpc_serving(generator, tokenizer, config) as address:
        yield generator, address
    assert not generator.live


@asynccontextmanager
async def served(wire: str, caller: Caller | None = None, **fields: Any) -> AsyncIterator[tuple[FakeGenerator, Client]]:
    if wire == "http":
        async with gateway(**fields) as server, client_of(wire, f"127.0.0.1:{server.port}", caller) as client:
            yield server.generator, client
    else:
        async with grpc_api(**fields) as (generator, address), client_of(wire, address, caller) as client:
            yield generator, client
