"""Our decoder against `transformers`, and against itself under every way to cut the work up (invariant 6)."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_builders import HandJob, generate, plan_of, scattered_pages, step
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model
from twostroke.engine.model.load import load_executor
from twostroke.engine.torch_executor import TorchExecutor

PROMPT_LENGTHS = (1, 5, 16, 33)


@cache
def model(directory: Path, family: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_model(root / family, family) for family in FAMILIES}


def poisoned(
    directory: Path, page_size: int, num_pages: int = 96, linear: str = "float32", threads: int = 1
) -> TorchExecutor:
    """Every slot holds NaN until it is written, so reading one that is not ours shows (B16)."""
    executor = load_executor(directory, page_size=page_size, num_pages=num_pages, linear=linear, threads=threads)
    executor.pool.tensor.fill_(float("nan"))
    return executor


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return [int(token) for token in torch.randint(4, VOCAB_SIZE, (length,), generator=generator)]


def expected_tokens(reference: Any, tokens: list[int], num: int) -> list[int]:
    output: list[int] = []
    with torch.inference_mode():
        while len(output) < num:
            output.append(int(reference(torch.tensor([tokens + output])).logits[0, -1].argmax()))
    return output


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_prompts_equal_transformers(models: dict[str, Path], family: str, page_size: int) -> None:
    executor = poisoned(models[family], page_size)
    reference = model(models[family], family)
    pages = scattered_pages(96, 96, seed=page_size)
    jobs = []
    for length in PROMPT_LENGTHS:
        needed = -(-length // page_size)
        jobs.append(HandJob(prompt(length), pages[:needed]))
        pages = pages[needed:]
    _, logits = executor.forward(plan_of([(job, len(job.prompt)) for job in jobs]))
    for row, job in enumerate(jobs):
        with torch.inference_mode():
            want = reference(torch.tensor([job.prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 32, 33, 34])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_then_decode_gives_the_greedy_tokens_of_transformers(
    models: dict[str, Path], family: str, chunk: int
) -> None:
    executor = poisoned(models[family], page_size=4)
    tokens = prompt(33)
    job = HandJob(tokens, scattered_pages(96, 12, seed=chunk))
    assert generate(executor, job, 12, chunk) == expected_tokens(model(models[family], family), tokens, 12)


def test_a_mixed_batch_of_decode_rows_and_chunks_changes_nobodys_tokens(models: dict[str, Path]) -> None:
    executor = poisoned(models["llama"], page_size=4)
    pages = scattered_pages(96, 60, seed=3)
    lengths = (3, 16, 21, 30)
    jobs = [HandJob(prompt(length), pages[15 * index : 15 * index + 15]) for index, length in enumerate(lengths)]
    # 1. two jobs decode while the others are still read in chunks of different sizes
    step(executor, [(jobs[0], 3), (jobs[1], 16)])
    step(executor, [(jobs[0], 1), (jobs[1], 1), (jobs[2], 8), (jobs[3], 5)])
    step(executor, [(jobs[1], 1), (jobs[0], 1), (jobs[2], 13), (jobs[3], 24)])
    # 2. a chunk of one token, then everyone decodes
    step(executor, [(jobs[0], 1), (jobs[2], 1), (jobs[3], 1)])
    for _ in range(8):
        step(executor, [(job, 1) for job in jobs])
    for job in jobs:
        want = expected_tokens(model(models["llama"], "llama"), job.prompt, len(job.output))
        assert job.output == want


def test_a_recycled_page_and_a_warm_prefix_give_the_cold_answer(models: dict[str, Path]) -> None:
    executor = poisoned(models["qwen3"], page_size=4)
    tokens = prompt(21)
    cold = HandJob(tokens, scattered_pages(96, 8, seed=1))
    generate(executor, cold, 6)
    # The next job reuses the five full prompt pages, and gets the cold job's dirty tail page as its own.
    warm = HandJob(tokens, [*cold.pages[:5], *reversed(cold.pages[5:])], num_computed=20)
    assert generate(executor, warm, 6) == cold.output


def test_pages_moved_through_bytes_continue_on_another_executor(models: dict[str, Path]) -> None:
    source, target = (poisoned(models["llama"], page_size=4) for _ in range(2))
    tokens = prompt(18)
    here = HandJob(tokens, scattered_pages(96, 10, seed=1))
    generate(source, here, 1)
    there = HandJob(tokens, scattered_pages(96, 10, seed=2), output=list(here.output), num_computed=18)
    data = bytes(source.memory.read(here.pages[:5]))
    target.memory.write(there.pages[:5], memoryview(data))
    assert generate(target, there, 8) == generate(source, here, 8)
