"""Every client over the whole path: one conversation, one answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from tests.client_servers import grpc_serving
from tests.cluster_harness import Shape
from tests.gateway_server import TIMEOUT_S, serving
from tests.routed_cluster import RoutedCluster, routed_cluster
from tests.waiting import until
from twostroke.client.grpc import GrpcClient
from twostroke.client.http import HttpClient
from twostroke.client.types import Message, Sampling
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.app import create_app
from twostroke.router.tokenizer import ByteTokenizer

SHAPE = Shape(page_size=4, num_pages=256)
CHAT = [Message("system", "Be brief."), Message("user", "Hi")]
PLAIN: Any = [{"role": "user", "content": "Hi"}]
NUM_TOKENS = 12
SAMPLING = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)


@dataclass
class Clients:
    routed: RoutedCluster
    http: HttpClient
    grpc: GrpcClient
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic


@asynccontextmanager
async def clients() -> AsyncIterator[Clients]:
    registry, tokenizer = CollectorRegistry(), ByteTokenizer()
    async with routed_cluster(SHAPE) as routed:
        app = create_app(routed.dispatcher, tokenizer, RouterSection(), RouterMetrics(registry, "fake"), registry)
        async with serving(app) as (_, port), grpc_serving(routed.dispatcher, tokenizer) as address:
            url = f"http://127.0.0.1:{port}"
            async with (
                HttpClient(url) as http,
                GrpcClient(address) as grpc,
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as openai,
                AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as anthropic,
            ):
                yield Clients(routed, http, grpc, openai, anthropic)


async def test_one_conversation_has_one_answer_by_every_client() -> None:
    async with clients() as by:
        response = await by.openai.responses.create(
            model="fake", instructions="Be brief.", input="Hi", max_output_tokens=NUM_TOKENS, temperature=0
        )
        asked: Any = {"model": "fake", "system": "Be brief.", "messages": PLAIN, "max_tokens": NUM_TOKENS}
        greedy = {"temperature": 0}
        message = await by.anthropic.messages.create(**asked, extra_body=greedy)
        over_http = await by.http.generate(CHAT, SAMPLING)
        over_grpc = await by.grpc.generate(CHAT, SAMPLING)
        num_prompt = len(await by.grpc.tokenize(CHAT))
        stop = over_grpc.text.split(",")[3] + ","
        stopped = await by.anthropic.messages.create(**asked, extra_body={**greedy, "stop_sequences": [stop]})
    texts = [response.output_text, message.content[0].text, over_http.text, over_grpc.text]  # type: ignore[union-attr]
    assert texts == [over_grpc.text] * 4
    assert over_grpc.text == "".join(f"{token}," for token in over_grpc.token_ids)
    assert response.usage is not None
    assert response.usage.input_tokens == over_http.usage.prompt_tokens == over_grpc.usage.prompt_tokens == num_prompt
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == num_prompt
    assert (response.status, message.stop_reason, over_grpc.finish_reason) == ("incomplete", "max_tokens", "length")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == over_grpc.text[: over_grpc.text.index(stop)]  # type: ignore[union-attr]


async def test_loads_are_those_of_the_workers() -> None:
    async with clients() as by:
        loads = await by.grpc.loads()
        workers = by.routed.dispatcher.fleet.workers()
    assert sorted((load.worker_id, load.role) for load in loads) == sorted(
        (worker.info.worker_id, worker.info.role.value) for worker in workers
    )
    assert all(load.known and load.pages_total == SHAPE.num_pages and load.pages_free > 0 for load in loads)


@pytest.mark.parametrize("wire", ["http", "grpc"])
async def test_a_stream_that_is_left_leaves_nothing_running(wire: str) -> None:
    async with clients() as by:
        client = by.http if wire == "http" else by.grpc
        async with client.stream(CHAT, Sampling(max_tokens=400, ignore_eos=True)) as stream:
            await anext(aiter(stream))
        await until(lambda: by.routed.dispatcher.num_live == 0)
