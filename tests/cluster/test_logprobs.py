"""Log-probabilities through the whole cluster: golden, whole and once, by P/D, locally, and after every loss."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cluster_harness import Shape
from tests.greedy_reference import TRANSPORTS, model_cluster, reference_model, shape_over
from tests.routed_cluster import Answer, Gate, RoutedCluster, read, routed_cluster
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.request import Phase
from twostroke.engine.fake_executor import golden_logprobs

PROMPT = tuple(range(50, 110))
LOCAL = Shape(prefill=0)
SLOW = Shape(prefill=2, decode=2, step_delay_s=0.004)


def check(routed: RoutedCluster, prompt: Sequence[int], answer: Answer, top: int, prompt_top: int | None) -> None:
    """All that was told is golden, one for each token."""
    vocab = routed.cluster.shape.vocab_size
    for choice, tokens in answer.tokens.items():
        assert answer.logprobs[choice] == golden_logprobs([*prompt, *tokens], len(prompt), top, vocab)
    if prompt_top is None:
        assert answer.prompt is None
    else:
        assert answer.prompt == golden_logprobs(prompt, 1, prompt_top, vocab)


@pytest.mark.parametrize("shape", [Shape(), Shape(links="grpc"), LOCAL], ids=["loopback", "grpc", "local"])
@pytest.mark.parametrize("max_tokens", [1, 2, 20])
async def test_they_are_golden_from_the_first_token_on(shape: Shape, max_tokens: int) -> None:
    async with routed_cluster(shape) as routed:
        for changes in ({}, {"temperature": 1.0, "seed": 4}, {"logit_bias": ((7, 100.0), (9, 100.0))}):
            answer = await routed.ask(PROMPT, max_tokens, logprobs=3, **changes)
            assert len(answer.tokens[0]) == max_tokens
            check(routed, PROMPT, answer, 3, None)
        assert set(answer.tokens[0]) <= {7, 9}


async def test_nothing_is_told_unless_asked() -> None:
    async with routed_cluster() as routed:
        answer = await routed.ask(PROMPT, 8)
        assert (answer.logprobs[0], answer.prompt) == ([], None)


@pytest.mark.parametrize("shape", [Shape(num_pages=256), Shape(links="grpc", num_pages=256), LOCAL], ids=str)
@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 150])
async def test_a_prompts_are_whole_though_it_is_cached(shape: Shape, length: int) -> None:
    prompt = tuple(range(30, 30 + length))
    async with routed_cluster(shape) as routed:
        await routed.ask(prompt, 8)
        for changes in ({"num_choices": 3, "logprobs": 1}, {}):
            answer = await routed.ask(prompt, 8, prompt_logprobs=2, **changes)
            assert answer.usage.cached_tokens == 0
            if changes:
                check(routed, prompt, answer, 1, 2)
                assert len(answer.tokens) == 3
            else:
                assert answer.prompt == golden_logprobs(prompt, 1, 2, routed.cluster.shape.vocab_size)
                assert answer.tokens[0] == routed.golden(prompt, 8)


async def test_many_scored_prompts_and_others_share_steps() -> None:
    prompts = [tuple(range(first, first + 70 + first)) for first in range(1, 9)]
    async with routed_cluster(Shape(num_pages=512, prefill_chunk=200, decode_chunk=200)) as routed:
        scored = [routed.ask(prompt, 6, logprobs=0, prompt_logprobs=1) for prompt in prompts]
        plain = [routed.ask(prompt, 6) for prompt in prompts]
        answers = await asyncio.gather(*scored, *plain)
        for prompt, answer in zip(prompts, answers, strict=False):
            check(routed, prompt, answer, 0, 1)
        for prompt, answer in zip(prompts, answers[len(prompts) :], strict=True):
            assert answer.tokens[0] == routed.golden(prompt, 6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING])
async def test_a_lost_worker_loses_none(phase: Phase, role: str, whole: bool) -> None:
    gate = Gate()
    async with routed_cluster(SLOW, gate=gate) as routed:
        request = routed.request(PROMPT, 24, logprobs=2, prompt_logprobs=1, whole=whole)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        if phase is Phase.DECODING:
            gate.open()
        await routed.reach(request.request_id, phase)
        nodes = routed.cluster.prefill if role == "prefill" else routed.cluster.decode
        busy = [node for node in nodes if not node.at_rest] or nodes
        await routed.cluster.lose(busy[0], "killed")
        gate.open()
        result = await answer
        assert result.tokens[0] == routed.golden(PROMPT, 24)
        check(routed, PROMPT, result, 2, 1)


async def test_a_failed_transfer_repeats_none() -> None:
    gate = Gate()
    async with routed_cluster(SLOW, gate=gate) as routed:
        request = routed.request(PROMPT, 24, logprobs=2, prompt_logprobs=0)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        await routed.reach(request.request_id, Phase.TRANSFERRING)
        gate.open(TransferFailed("the network ate it"))
        result = await answer
        assert result.usage.attempts == 2
        check(routed, PROMPT, result, 2, 0)


async def test_preempted_jobs_lose_none() -> None:
    prompts = [tuple(range(first, first + 20)) for first in range(100, 800, 100)]
    for shape in (Shape(decode_pages=32), Shape(prefill=0, num_pages=32)):
        async with routed_cluster(shape) as routed:
            answers = await asyncio.gather(
                *(
                    routed.ask(prompt, 40, logprobs=1, prompt_logprobs=1, whole=number % 2 == 0)
                    for number, prompt in enumerate(prompts)
                )
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                check(routed, prompt, answer, 1, 1)


# ------------------------------------------------------------------------------------------- a real model

TEXTS = [tuple(range(10, 10 + length)) for length in (1, 5, 33, 70)]
ASKED = {"logprobs": 4, "prompt_logprobs": 3, "temperature": 0.7, "seed": 3, "frequency_penalty": 0.5}


def near(left: Sequence[TokenLogprob], right: Sequence[TokenLogprob]) -> None:
    assert [value.rank for value in left] == [value.rank for value in right]
    for one, other in zip(left, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top == pytest.approx(other.top, abs=1e-4)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_pair_and_a_local_worker_tell_the_same_as_the_reference(tmp_path: Path, transport: str) -> None:
    directory = make_tiny_model(tmp_path, "qwen2")
    answers = []
    for shape in (shape_over(transport, num_pages=256), Shape(prefill=0, num_pages=256)):
        async with model_cluster(directory, shape) as routed:
            answers.append(await asyncio.gather(*(routed.ask(prompt, 12, **ASKED) for prompt in TEXTS)))
    for prompt, pair, local in zip(TEXTS, *answers, strict=True):
        assert pair.tokens == local.tokens
        near(pair.logprobs[0], local.logprobs[0])
        near(pair.prompt or (), local.prompt or ())
        told = [*(pair.prompt or ()), *pair.logprobs[0]]
        tokens = [*prompt, *pair.tokens[0]]
        assert len(told) == len(tokens) - 1
        with torch.inference_mode():
            want = torch.log_softmax(reference_model(directory)(torch.tensor([tokens])).logits[0], dim=-1)
        for place, (token, value) in enumerate(zip(tokens[1:], told, strict=True)):
            assert value.logprob == pytest.approx(float(want[place, token]), abs=1e-4)
            assert max(value.top_ids) < VOCAB_SIZE
