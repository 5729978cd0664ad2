"""Tiny models of every family through prefill, hand-over and decode: the tokens of `transformers`, whatever the
page size, chunk, transport, cache and batch; and drawn tokens that depend on seed and position alone (E28, E29)."""

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster_harness import Shape
from tests.greedy_reference import TRANSPORTS, check_greedy, model_cluster, num_preemptions, shape_over
from tests.routed_cluster import RoutedCluster
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

PAGE_SIZES = (1, 4, 16)
CHUNKS = (7, 33, 80)
NUM_TOKENS = 12
POOL_TOKENS = 2048
FULL = list(product(FAMILIES, PAGE_SIZES, CHUNKS, TRANSPORTS))
SOME = [
    (name, page_size, CHUNKS[(family + size) % 3], TRANSPORTS[(2 * family + size) % 3])
    for family, name in enumerate(FAMILIES)
    for size, page_size in enumerate(PAGE_SIZES)
]
UNEVEN = (3, 40, 17, 8, 31, 12, 25, 5)

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def prompt_of(length: int) -> Prompt:
    generator = torch.Generator().manual_seed(length)
    return tuple(int(token) for token in torch.randint(4, VOCAB_SIZE, (length,), generator=generator))


def ragged(page_size: int, chunk: int) -> list[Prompt]:
    """Around the borders of pages and chunks."""
    around = {1, 2, 33} | {border + by for border in (page_size, 2 * page_size, chunk) for by in (-1, 0, 1)}
    return [prompt_of(length) for length in sorted(around - {0})]


async def ask_all(routed: RoutedCluster, prompts: list[Prompt], num: int, **params: Any) -> list[list[int]]:
    answers = await asyncio.gather(*(routed.ask(prompt, num, **params) for prompt in prompts))
    return [answer.tokens[0] for answer in answers]


async def run_cell(directory: Path, page_size: int, chunk: int, transport: str) -> None:
    shape = shape_over(transport, page_size=page_size, num_pages=POOL_TOKENS // page_size, prefill_chunk=chunk)
    prompts = ragged(page_size, chunk)
    async with model_cluster(directory, shape) as routed:
        # 1. cold, all at once
        cold = await ask_all(routed, prompts, NUM_TOKENS)
        check_greedy(directory, list(zip(prompts, cold, strict=True)), NUM_TOKENS)
        # 2. warm: the same and longer ones, all at once
        prompts += [prompt + (5, 6, 7) for prompt in prompts]
        warm = await ask_all(routed, prompts, NUM_TOKENS)
        check_greedy(directory, list(zip(prompts, warm, strict=True)), NUM_TOKENS)
        # 3. warm and alone; only the last three tokens differ from what is cached
        answer = await routed.ask(prompts[-1] + (9,), NUM_TOKENS)
        check_greedy(directory, [(prompts[-1] + (9,), answer.tokens[0])], NUM_TOKENS)
        assert answer.usage.cached_tokens > 0
        assert answer.usage.transport == transport


@pytest.mark.parametrize(("family", "page_size", "chunk", "transport"), SOME)
async def test_greedy_tokens_equal_transformers(
    models: dict[str, Path], family: str, page_size: int, chunk: int, transport: str
) -> None:
    await run_cell(models[family], page_size, chunk, transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "page_size", "chunk", "transport"), [cell for cell in FULL if cell not in set(SOME)]
)
async def test_greedy_tokens_equal_transformers_in_every_cell(
    models: dict[str, Path], family: str, page_size: int, chunk: int, transport: str
) -> None:
    await run_cell(models[family], page_size, chunk, transport)


@pytest.mark.parametrize(("prefill", "threshold"), [(1, 20), (0, 0)])
async def test_local_prefill_gives_the_same(models: dict[str, Path], prefill: int, threshold: int) -> None:
    prompts = ragged(4, 33)
    policy = {"local_threshold_tokens": threshold}
    async with model_cluster(models["qwen2"], Shape(prefill=prefill, num_pages=512), policy=policy) as routed:
        for _ in ("cold", "warm"):
            answers = await ask_all(routed, prompts, NUM_TOKENS)
            check_greedy(models["qwen2"], list(zip(prompts, answers, strict=True)), NUM_TOKENS)


TIGHT = Shape(num_pages=512, decode_pages=32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_preempted_answers_equal_transformers(models: dict[str, Path], family: str) -> None:
    prompts = [prompt_of(length) for length in UNEVEN]
    async with model_cluster(models[family], TIGHT) as routed:
        answers = await ask_all(routed, prompts, 40)
        assert num_preemptions(routed) > 0
    check_greedy(models[family], list(zip(prompts, answers, strict=True)), 40)


async def test_a_seed_gives_the_same_alone_in_a_batch_after_preemption_and_local(models: dict[str, Path]) -> None:
    prompts = [prompt_of(length) for length in UNEVEN]
    drawn = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    directory = models["mistral"]
    async with model_cluster(directory, Shape(num_pages=512)) as routed:
        alone = [(await routed.ask(prompt, 40, **drawn)).tokens[0] for prompt in prompts]
        assert await ask_all(routed, prompts, 40, **drawn) == alone
        greedy = await ask_all(routed, prompts, 40)
    assert all(one != other for one, other in zip(alone, greedy, strict=True))
    async with model_cluster(directory, shape_over("grpc", num_pages=512)) as routed:
        assert await ask_all(routed, prompts, 40, **drawn) == alone
    async with model_cluster(directory, TIGHT) as routed:
        assert await ask_all(routed, prompts, 40, **drawn) == alone
        assert num_preemptions(routed) > 0
    async with model_cluster(directory, Shape(prefill=0, num_pages=512)) as routed:
        assert await ask_all(routed, prompts, 40, **drawn) == alone


def _repetition(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
    for token in {*prompt, *output}:
        logits[token] = logits[token] / 1.8 if logits[token] > 0 else logits[token] * 1.8


def _presence(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
    for token in set(output):
        logits[token] -= 1.5


def _frequency(logits: torch.Tensor, prompt: list[int], output: list[int]) -> None:
    for token in output:
        logits[token] -= 0.7


@pytest.mark.parametrize(
    ("penalty", "adjust"),
    [
        ({"repetition_penalty": 1.8}, _repetition),
        ({"presence_penalty": 1.5}, _presence),
        ({"frequency_penalty": 0.7}, _frequency),
    ],
)
async def test_penalties_count_the_same_tokens_across_the_hand_over(
    models: dict[str, Path], penalty: dict[str, float], adjust: Any
) -> None:
    prompts = [(70, 71, 72) * 4, *(prompt_of(length) for length in (9, 20, 33))]
    for prefill in (1, 0):
        async with model_cluster(models["qwen2"], Shape(prefill=prefill)) as routed:
            answers = await ask_all(routed, prompts, 30, **penalty)
        check_greedy(models["qwen2"], list(zip(prompts, answers, strict=True)), 30, adjust)
