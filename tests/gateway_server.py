"""The HTTP gateway over the fake generator, under uvicorn on a free port of this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from tests.waiting import until
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.fake_generator import FakeGenerator
from twostroke.router.gateway.app import create_app
from twostroke.router.gateway.server import http_server, listen
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.tokenizer import ByteTokenizer, Tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TIMEOUT_S = 10.0


@dataclass
class Gateway:
    generator: FakeGenerator
    client: httpx.AsyncClient
    port: int
    server: uvicorn.Server
    registry: CollectorRegistry
    gate: GrammarGate

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(
            path, json=body, headers={name.replace("_", "-"): headers[name] for name in headers}
        )

    async def raw(self, path: str, body: Mapping[str, Any] | bytes, *headers: str) -> bytes:
        """Send one request by hand; everything the server sends until it closes."""
        async with self.open(path, body, "connection: close", *headers) as (reader, _), asyncio.timeout(TIMEOUT_S):
            return await reader.read()

    @asynccontextmanager
    async def open(
        self, path: str, body: Mapping[str, Any] | bytes, *headers: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Send one request by hand; the connection closes with the context, whatever came back."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
        async with self.connect() as (reader, writer):
            writer.write("\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + data)
            await writer.drain()
            yield reader, writer

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def until_cancelled(self, count: int) -> None:
        """Wait until this many requests were cancelled."""
        await until(lambda: len(self.generator.cancelled) >= count)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"model_name": "fake", "engine": "router", **labels}) or 0.0


@asynccontextmanager
async def gateway(
    config: RouterSection | None = None, tokenizer: Tokenizer | None = None, **fields: Any
) -> AsyncIterator[Gateway]:
    """`fields` go to the FakeGenerator. Leaving the context checks that no request is live."""
    tokenizer = tokenizer or ByteTokenizer()
    generator = FakeGenerator(tokenizer, **fields)
    registry = CollectorRegistry()
    gate = GrammarGate()
    metrics = RouterMetrics(registry, "fake")
    app = create_app(generator, tokenizer, config or RouterSection(), metrics, registry, gate=gate)
    try:
        async with (
            serving(app) as (server, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client,
        ):
            yield Gateway(generator, client, port, server, registry, gate)
    finally:
        await gate.close()
    assert not generator.live


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """The app on a free port of 127.0.0.1, which is given with its server."""
    server = http_server(app, 2)
    listener = listen("127.0.0.1", 0)
    # `serve` would take over the process's signals.
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        async with asyncio.timeout(TIMEOUT_S):
            await task
        listener.close()


def events(data: bytes | str) -> list[Any]:
    """The JSON of each event of a stream, `[DONE]` as text; checks the framing."""
    text = data.decode() if isinstance(data, bytes) else data
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def events_of(text: str) -> list[tuple[str, Any]]:
    """(name, JSON) of each event of a stream whose events have names; checks the framing."""
    assert text.endswith("\n\n")
    found = []
    for frame in text[:-2].split("\n\n"):
        name, data = frame.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
