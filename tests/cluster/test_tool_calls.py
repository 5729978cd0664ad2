"""Tool calls through prefill, hand-over and decode: forced ones validate, and every way gives the same."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
from prometheus_client import CollectorRegistry

from tests.cluster_harness import Shape
from tests.gateway_server import CHAT, events, serving
from tests.routed_cluster import routed_cluster
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.engine.vocabulary import byte_vocabulary
from twostroke.router.gateway.app import create_app
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle, ToolFormat

SEEDS = range(5)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"day": {"enum": ["monday", "d\u00edmanche"]}},
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
ASKED: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "rain?"}],
    "tools": [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}],
    "parallel_tool_calls": False,
    "max_tokens": 400,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@asynccontextmanager
async def over_http(shape: Shape, format: ToolFormat) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer, gate, registry = ByteTokenizer(style=ChatStyle(format)), GrammarGate(), CollectorRegistry()
    async with routed_cluster(shape, vocabulary=byte_vocabulary(), decoders=tokenizer.text_decoders) as routed:
        metrics = RouterMetrics(registry, "fake")
        app = create_app(routed.dispatcher, tokenizer, RouterSection(), metrics, registry, gate=gate)
        async with (
            serving(app) as (_, port),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ):
            yield client
    await gate.close()


async def call(client: httpx.AsyncClient, seed: int, choice: object, *, stream: bool) -> tuple[str, str]:
    """Name and arguments of the one call that is the answer."""
    body = {**ASKED, "seed": seed, "tool_choice": choice, "stream": stream}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    pieces = [each["choices"][0] for each in (events(answer.text)[:-1] if stream else [answer.json()])]
    assert pieces[-1]["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    said = [piece["delta" if stream else "message"] for piece in pieces]
    assert not any(one.get("content") for one in said)
    functions = [part["function"] for one in said for part in one.get("tool_calls", [])]
    [name] = [function["name"] for function in functions if "name" in function]
    return name, "".join(function["arguments"] for function in functions)


async def call_all(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Whole, and the same streamed."""
    asked = [(seed, choice) for seed in SEEDS for choice in ("required", NAMED)]
    whole = await asyncio.gather(*(call(client, seed, choice, stream=False) for seed, choice in asked))
    assert await asyncio.gather(*(call(client, seed, choice, stream=True) for seed, choice in asked)) == whole
    return list(whole)


async def test_forced_calls_validate_by_every_way() -> None:
    pair, local = Shape(vocab_size=258, num_pages=4096), Shape(prefill=0, vocab_size=258, num_pages=4096)
    for format in ToolFormat:
        async with over_http(pair, format) as client:
            calls = await call_all(client)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {"maxProperties": 0})
        assert {name for name, _ in calls} == {"weather", "now"}
        assert len(set(calls)) > len(SEEDS) / 2
        async with over_http(local, format) as client:
            assert await call_all(client) == calls
