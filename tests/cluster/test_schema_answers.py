"""Answers to JSON schemas validate, every one of them: over HTTP, streamed and not, undisturbed, preempted, and with a
decode worker killed under them. The schemas bound every string and array, white space is compact, and `max_tokens` is
above the longest answer, so nothing may end otherwise than by the grammar's own end.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client import CollectorRegistry

from tests.cluster_harness import Shape
from tests.gateway_server import COMPLETION, events, serving
from tests.greedy_reference import model_cluster, num_preemptions
from tests.process_cluster import process_cluster
from tests.routed_cluster import RoutedCluster, routed_cluster
from tests.tiny_models import make_tiny_model
from tests.waiting import until
from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.messages import Role
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.engine.vocabulary import byte_vocabulary, load_vocabulary
from twostroke.router.gateway.app import create_app
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer

MAX_TOKENS = 200
"""Each is a byte or more. A character of a string takes six bytes at most, as an escape, or twelve as two of them."""
IN_FLIGHT = 40
MANY = 25
"""Answers to each of eight schemas: 200."""
FEW = 3


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 4}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 99}
POINT = {"$ref": "#/$defs/point"}
SCHEMAS: list[dict[str, Any]] = [
    an_object(name=SHORT, age={"type": "integer", "minimum": -5, "maximum": 150}),
    an_object(
        kind={"enum": ["cat", "dog", "h\u00e9risson", None, 7]},
        tags={"type": "array", "items": DIGITS, "maxItems": 4},
        more={**an_object(ok={"type": "boolean"}, at={"type": ["null", "string"], "maxLength": 3}), "required": ["ok"]},
    ),
    {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": an_object(x=DIGITS, on={"type": "boolean"}), "maxItems": 3},
    {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 5}, DIGITS, {"type": "null"}, an_object(a=DIGITS)]},
    {"$defs": {"point": an_object(x=DIGITS, y=DIGITS)}, **an_object(start=POINT, end=POINT)},
    an_object(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
        on={"type": "string", "format": "date"},
        value={"const": [1, "\u2713"]},
    ),
    {"type": "array", "prefixItems": [DIGITS, {"type": "boolean"}, SHORT], "items": False, "minItems": 3},
]

FAKE = Shape(vocab_size=258, num_pages=1024)
TIGHT = replace(FAKE, decode_pages=54, step_delay_s=0.002)
PAIRS = replace(FAKE, prefill=2, decode=2, step_delay_s=0.002)

Cluster = Callable[[Shape], AbstractAsyncContextManager[tuple[RoutedCluster, httpx.AsyncClient]]]


@asynccontextmanager
async def http(routed: RoutedCluster, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    registry, gate = CollectorRegistry(), GrammarGate()
    metrics = RouterMetrics(registry, "fake")
    app = create_app(routed.dispatcher, tokenizer, RouterSection(), metrics, registry, gate=gate)
    async with (
        serving(app) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client
    await gate.close()


@asynccontextmanager
async def fakes(shape: Shape) -> AsyncIterator[tuple[RoutedCluster, httpx.AsyncClient]]:
    tokenizer = ByteTokenizer()
    routing = {"vocabulary": byte_vocabulary(), "decoders": tokenizer.text_decoders, "max_continuations": 64}
    async with routed_cluster(shape, **routing) as routed, http(routed, tokenizer) as client:  # type: ignore[arg-type]
        yield routed, client


async def ask(client: httpx.AsyncClient, schema: int, seed: int, *, stream: bool, **fields: Any) -> str:
    """The text of an answer, which ended as it should and validates."""
    body = {
        "model": "fake",
        "prompt": "A cat:",
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[schema]}},
        "structured_outputs": {"disable_any_whitespace": True},
        "stream": stream,
        **fields,
    }
    answer = await client.post(COMPLETION, json=body)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "stop"
    text = "".join(choice["text"] for choice in choices)
    if "stop" not in fields:
        jsonschema.validate(json.loads(text), SCHEMAS[schema])
    return text


async def ask_all(client: httpx.AsyncClient, number: int, *, stream: bool, **fields: Any) -> list[str]:
    """`number` answers to each schema."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(schema: int, seed: int) -> str:
        async with room:
            return await ask(client, schema, seed, stream=stream, **fields)

    return list(await asyncio.gather(*(one(schema, seed) for seed in range(number) for schema in range(len(SCHEMAS)))))


async def both(client: httpx.AsyncClient, number: int) -> list[str]:
    whole = await ask_all(client, number, stream=False)
    assert await ask_all(client, number, stream=True) == whole
    return whole


async def with_a_loss(routed: RoutedCluster, lost: int, answers: Awaitable[list[str]]) -> list[str]:
    """`answers` while decode worker `lost` is killed under some of them, and another comes instead."""
    task = asyncio.ensure_future(answers)
    node = routed.cluster.decode[lost]
    await until(lambda: node.host.load().running > 2, 20)
    before = routed.metric("continuations_total")
    await routed.cluster.lose(node, "killed")
    await routed.attach(await routed.cluster.add(Role.DECODE))
    texts = await task
    assert routed.metric("continuations_total") > before
    return texts


async def check_all_ways(cluster: Cluster, number: int) -> None:
    """Undisturbed, preempted and with a worker lost: all answers validate, and they are the same."""
    async with cluster(FAKE) as (_, client):
        wanted = await both(client, number)
        assert len(set(wanted)) > len(wanted) / 2, "as good as one answer"
    async with cluster(TIGHT) as (routed, client):
        assert await both(client, number) == wanted
        assert num_preemptions(routed) > 0
    async with cluster(PAIRS) as (routed, client):
        assert await with_a_loss(routed, 0, ask_all(client, number, stream=False)) == wanted
        assert await with_a_loss(routed, 1, ask_all(client, number, stream=True)) == wanted


async def test_some_of_them() -> None:
    await check_all_ways(fakes, FEW)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_hundred_of_two_hundred() -> None:
    await check_all_ways(fakes, MANY)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_of_two_hundred_by_a_tiny_model(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    tokenizer = ModelTokenizer(directory)

    @asynccontextmanager
    async def computing(shape: Shape) -> AsyncIterator[tuple[RoutedCluster, httpx.AsyncClient]]:
        routing = {"vocabulary": load_vocabulary(directory), "decoders": tokenizer.text_decoders}
        own = replace(shape, vocab_size=tokenizer.vocab_size, max_positions=512, step_delay_s=0.0)
        async with (
            model_cluster(directory, own, max_continuations=64, **routing) as routed,
            http(routed, tokenizer) as client,
        ):
            yield routed, client

    await check_all_ways(computing, MANY)


async def test_a_killed_process_costs_no_answer(tmp_path: Path) -> None:
    async with process_cluster(tmp_path, 1, 2, model={"fake_step_ms": 20}) as cluster:
        wanted = await ask_all(cluster.http, FEW, stream=False)
        answers = asyncio.create_task(ask_all(cluster.http, FEW, stream=True))
        await cluster.at_work("decode-0")
        cluster.kill("decode-0")
        assert await answers == wanted
        assert await cluster.metric("continuations_total") > 0


async def test_stop_strings_and_log_probabilities_change_no_token() -> None:
    async with fakes(FAKE) as (_, client):
        wanted = await both(client, FEW)
        for stream in (False, True):
            assert await ask_all(client, FEW, stream=stream, logprobs=2) == wanted
            cut = await ask_all(client, FEW, stream=stream, stop=[","])
            assert cut == [text.partition(",")[0] for text in wanted]
