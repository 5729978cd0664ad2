"""Answers cut by an output budget and continued through the whole cluster: the uncut answer, token for token, in every
way of serving it, and cheap, since its pages are still there.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.cluster_harness import Shape
from tests.gateway_server import CHAT, COMPLETION, TIMEOUT_S, events, serving
from tests.greedy_reference import model_cluster
from tests.routed_cluster import Answer, RoutedCluster, read, routed_cluster
from tests.tiny_models import make_tiny_model
from tests.waiting import until
from twostroke.cluster.config import BudgetSection, RouterSection
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.core.ids import new_request_id
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.engine.vocabulary import byte_vocabulary
from twostroke.router.continuation import ContinuationTokens, begin
from twostroke.router.gateway.app import create_app
from twostroke.router.request import Continuation, GenerateRequest
from twostroke.router.tokenizer import ByteTokenizer

PROMPT = tuple(range(40, 100))
PAIR = Shape(num_pages=512)
LOCAL = Shape(prefill=0, num_pages=512)
SEALED = ContinuationTokens([b"a key of these tests"], 60)
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5, "logprobs": 2}


async def go_on(
    routed: RoutedCluster, request: GenerateRequest, budget: int, opened: Continuation | None = None
) -> Answer:
    """One part of the answer to `request`."""
    model = routed.dispatcher.model
    assert model is not None
    own = replace(request, request_id=new_request_id())
    part = begin(own, model, budget, opened, seed=None, max_tokens=None)
    return await read(routed.dispatcher.submit(part))


def opened(answer: Answer, choice: int = 0) -> Continuation | None:
    """What the client would send back, as the gateway reads it."""
    continuation = answer.ends[choice].continuation
    return None if continuation is None else SEALED.open(SEALED.seal(continuation), 4096)


async def in_parts(
    routed: RoutedCluster, request: GenerateRequest, budgets: Sequence[int], choice: int = 0
) -> list[Answer]:
    """All parts: each under the next of `budgets`, and then under the last of them."""
    parts = [await go_on(routed, request, budgets[0])]
    while (continuation := opened(parts[-1], choice)) is not None:
        parts.append(await go_on(routed, request, budgets[min(len(parts), len(budgets) - 1)], continuation))
    return parts


def check_joined(parts: Sequence[Answer], uncut: Answer, choice: int = 0) -> None:
    assert [token for part in parts for token in part.tokens.get(choice, ())] == uncut.tokens[choice]
    assert "".join(part.text[choice] for part in parts) == uncut.text[choice]
    assert [value for part in parts for value in part.logprobs[choice]] == uncut.logprobs[choice]
    *cut, last = [part.ends[choice].finish_reason for part in parts]
    assert set(cut) <= {FinishReason.LENGTH}
    assert last is uncut.ends[choice].finish_reason
    assert sum(part.ends[choice].num_output for part in parts) == uncut.ends[choice].num_output


@pytest.mark.parametrize("shape", [PAIR, LOCAL, Shape(links="grpc", num_pages=512)], ids=["pair", "local", "grpc"])
@pytest.mark.parametrize("sampling", [{}, DRAWN, {"min_tokens": 9, "end_token_ids": tuple(range(0, 1000, 3))}], ids=str)
async def test_cut_at_every_token_it_joins(shape: Shape, sampling: dict[str, Any]) -> None:
    async with routed_cluster(shape) as routed:
        request = routed.request(PROMPT, 14, **sampling)
        uncut = await read(routed.dispatcher.submit(request))
        num = len(uncut.tokens[0])
        for cut in range(1, num):
            check_joined(await in_parts(routed, request, [cut, num]), uncut)
        for budget in (1, 2, 3):
            check_joined(await in_parts(routed, request, [budget]), uncut)


async def test_a_stop_string_across_the_cut_never_shows() -> None:
    async with routed_cluster(PAIR) as routed:
        uncut = await routed.ask(PROMPT, 12, **DRAWN)
        text = uncut.text[0]
        for start in range(8, 20):
            request = routed.request(PROMPT, 12, stop=(text[start : start + 9],), **DRAWN)
            stopped = await read(routed.dispatcher.submit(request))
            assert stopped.ends[0].finish_reason is FinishReason.STOP
            for cut in range(1, len(stopped.tokens[0])):
                check_joined(await in_parts(routed, request, [cut, 99]), stopped)


async def test_the_prompt_and_the_answer_so_far_are_found_and_counted() -> None:
    async with routed_cluster(PAIR, policy={"local_threshold_tokens": 16}) as routed:
        request = routed.request(PROMPT, 40)
        parts = [await go_on(routed, request, 20)]
        for node in routed.cluster.nodes:
            for batch in node.batches:
                routed.dispatcher.index.apply(batch)
        parts.append(await go_on(routed, request, 20, opened(parts[0])))
        assert opened(parts[1]) is None
        assert [part.usage.cached_tokens for part in parts] == [0, len(PROMPT)]
        assert [part.usage.prompt_tokens for part in parts] == [len(PROMPT)] * 2
        assert [part.usage.completion_tokens for part in parts] == [20, 20]
        # All but the last page is there, so that no other worker is needed.
        assert parts[1].usage.prefill_worker == ""


async def test_choices_go_on_alone_and_as_they_were() -> None:
    async with routed_cluster(PAIR) as routed:
        request = routed.request(PROMPT, 20, num_choices=3, **DRAWN)
        uncut = await read(routed.dispatcher.submit(request))
        first = await go_on(routed, request, 7)
        for choice in (2, 0, 1):
            later = await go_on(routed, request, 99, opened(first, choice))
            assert set(later.tokens) == {choice}
            check_joined([first, later], uncut, choice)


async def test_a_prompts_log_probabilities_are_not_computed_again() -> None:
    async with routed_cluster(PAIR) as routed:
        request = routed.request(PROMPT, 20, prompt_logprobs=1, logprobs=1)
        uncut = await read(routed.dispatcher.submit(request))
        parts = await in_parts(routed, request, [8])
        assert parts[0].prompt == uncut.prompt
        assert [part.prompt for part in parts[1:]] == [None, None]
        check_joined(parts, uncut)
        assert parts[1].usage.cached_tokens > 0


async def test_a_grammar_goes_on_where_it_stood() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), compact=True)
    asked: dict[str, Any] = {"temperature": 1.0, "end_token_ids": (ByteTokenizer.END,), "grammar": grammar}
    shape = Shape(vocab_size=258, num_pages=1024)
    decoders = ByteTokenizer().text_decoders
    async with routed_cluster(shape, vocabulary=byte_vocabulary(), decoders=decoders) as routed:
        for seed in range(4):
            request = routed.request(PROMPT, 100, seed=seed, **asked)
            uncut = await read(routed.dispatcher.submit(request))
            assert json.loads(uncut.text[0]).keys() == {"a", "b"}
            for budget in (2, 7):
                check_joined(await in_parts(routed, request, [budget]), uncut)


async def test_another_worker_goes_on_as_well() -> None:
    async with routed_cluster(Shape(decode=2, num_pages=512)) as routed:
        request = routed.request(PROMPT, 30, **DRAWN)
        uncut = await read(routed.dispatcher.submit(request))
        first = await go_on(routed, request, 11)
        gone = next(node for node in routed.cluster.decode if node.info.worker_id == first.usage.decode_worker)
        await routed.cluster.lose(gone, "killed")
        later = await go_on(routed, request, 99, opened(first))
        assert later.usage.decode_worker != first.usage.decode_worker
        check_joined([first, later], uncut)


async def test_a_lost_worker_within_a_continuation_loses_nothing() -> None:
    async with routed_cluster(Shape(prefill=2, decode=2, num_pages=512, step_delay_s=0.004)) as routed:
        request = routed.request(PROMPT, 40, **DRAWN)
        uncut = await read(routed.dispatcher.submit(request))
        first = await go_on(routed, request, 9)
        later = asyncio.create_task(go_on(routed, request, 99, opened(first)))
        decode = routed.cluster.decode
        await until(lambda: any(node.host.load().running for node in decode))
        await routed.cluster.lose(next(node for node in decode if node.host.load().running), "killed")
        check_joined([first, await later], uncut)


# ---------------------------------------------------------------------------------------- a real model, HTTP


async def test_penalties_see_the_tokens_of_earlier_parts(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen2")
    penalties = {"repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.8}
    for shape in (PAIR, LOCAL):
        async with model_cluster(directory, shape) as routed:
            for drawn in ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}):
                request = routed.request((70, 71, 72) * 4, 16, time_left_s=60.0, **penalties, **drawn)
                uncut = await read(routed.dispatcher.submit(request), timeout_s=60.0)
                for budget in (1, 5, 7):
                    parts = await in_parts(routed, request, [budget])
                    assert [token for part in parts for token in part.tokens[0]] == uncut.tokens[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_over_http_the_parts_are_the_answer(path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"prompt": "Once upon a time"} if path == COMPLETION else {}
    body = prompt or {"messages": [{"role": "user", "content": "Once upon a time"}]}
    body |= {"model": "fake", "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "stream": stream}
    tokenizer = ByteTokenizer()
    config = RouterSection(budget=BudgetSection(output_tokens=9))
    async with routed_cluster(Shape(num_pages=512, vocab_size=258), decoders=tokenizer.text_decoders) as routed:
        texts: list[str] = []
        for settings, seed in ((RouterSection(), 5), (config, 5), (config, None)):
            registry = CollectorRegistry()
            app = create_app(routed.dispatcher, tokenizer, settings, RouterMetrics(registry, "fake"), registry)
            async with (
                serving(app) as (_, port),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client,
            ):
                text, num_parts = await converse(client, path, {**body, "seed": seed})
            assert num_parts == (1 if settings is not config else 5)
            texts.append(text)
    assert texts[0] == texts[1] != texts[2]


async def converse(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """The joined text of all parts, and how many there were."""
    text, num_parts, continuation = "", 0, None
    while True:
        response = await client.post(path, json={**body, "continuation": continuation})
        assert response.status_code == 200, response.text
        num_parts += 1
        continuation = None
        for chunk in events(response.text)[:-1] if body["stream"] else [response.json()]:
            [choice] = chunk["choices"]
            text += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            continuation = choice.get("continuation")
        if continuation is None:
            return text, num_parts
