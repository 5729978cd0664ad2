"""HTTP over the whole path: a list of prompts is answered as each alone; the log line names template versions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.cluster_harness import Shape
from tests.gateway_server import CHAT, COMPLETION, TIMEOUT_S, events, serving
from tests.routed_cluster import RoutedCluster, routed_cluster
from twostroke.cluster.config import RouterSection, TemplatesSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.app import create_app
from twostroke.router.tokenizer import ByteTokenizer

SHAPE = Shape(page_size=4, num_pages=256, prefill_chunk=16, vocab_size=256)
PROMPTS = [list(range(20, 60)), list(range(20, 45)), list(range(90, 97)), list(range(20, 60))]
BODY = {"model": "fake", "max_tokens": 12, "ignore_eos": True, "temperature": 1, "seed": 7, "n": 2}


@asynccontextmanager
async def http(routed: RoutedCluster, tokenizer: ByteTokenizer) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    app = create_app(routed.dispatcher, tokenizer, RouterSection(), RouterMetrics(registry, "fake"), registry)
    async with (
        serving(app) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client,
    ):
        yield client


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_list_of_prompts_is_answered_as_each_alone(streamed: bool) -> None:
    async with routed_cluster(SHAPE) as routed, http(routed, ByteTokenizer()) as client:

        async def ask(prompt: object, **changes: Any) -> tuple[list[str], dict[str, Any]]:
            response = await client.post(COMPLETION, json={**BODY, "prompt": prompt, **changes})
            assert response.status_code == 200, response.text
            if not changes:
                answer = response.json()
                return [choice["text"] for choice in answer["choices"]], answer["usage"]
            *chunks, last, _ = events(response.text)
            texts: dict[int, str] = {}
            for chunk in chunks:
                [choice] = chunk["choices"]
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            return [texts[index] for index in range(len(texts))], last["usage"]

        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        together, usage = await ask(PROMPTS, **options)
        alone = [await ask(prompt) for prompt in PROMPTS]
    assert together == [text for texts, _ in alone for text in texts]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == sum(one[name] for _, one in alone)
    assert together[:2] == together[6:]


async def test_the_line_of_a_chat_names_the_versions_of_its_templates(tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("{# version: v7 #}\nBe brief.")
    tokenizer = ByteTokenizer(TemplatesSection(system_prompt=str(system)))
    chat = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    # The model's vocabulary must hold the begin and end tokens that a chat has.
    async with routed_cluster(Shape(page_size=4, num_pages=256)) as routed, http(routed, tokenizer) as client:
        with capture_logs() as logs:
            assert (await client.post(CHAT, json=chat)).status_code == 200
            completion = {"model": "fake", "prompt": "Hi", "max_tokens": 4}
            assert (await client.post(COMPLETION, json=completion)).status_code == 200
    lines = [entry for entry in logs if entry["event"] == "request"]
    assert lines[0]["template"].startswith("system:v7+")
    assert "template" not in lines[1]
