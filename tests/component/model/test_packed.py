"""The packed decoder against `transformers` on weights that float16 holds exactly, however the work is cut."""

from pathlib import Path

import pytest
import torch

from tests.component.model.test_equality import expected_tokens, model, poisoned, prompt
from tests.model_builders import HandJob, generate, plan_of, scattered_pages, step
from tests.tiny_models import FAMILIES, make_tiny_model, tiny_config
from twostroke.cluster.core.errors import ConfigError
from twostroke.engine.model.config import parse_model_config
from twostroke.engine.model.load import load_executor
from twostroke.engine.model.packed_decoder import packing_obstacle
from twostroke.engine.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(
    bool(packing_obstacle(parse_model_config(tiny_config("qwen3")))), reason="this CPU has no packed form"
)
LENGTHS = (1, 5, 16, 33, 70)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("packable")
    return {family: make_tiny_model(root / family, family, packable=True) for family in FAMILIES}


def packed(directory: Path, page_size: int, threads: int = 1) -> TorchExecutor:
    return poisoned(directory, page_size, num_pages=160, linear="packed_fp16", threads=threads)


def jobs_of(page_size: int, lengths: tuple[int, ...] = LENGTHS, room: int = 20) -> list[HandJob]:
    pages = scattered_pages(160, 160, seed=page_size)
    jobs = []
    for length in lengths:
        needed = -(-(length + room) // page_size)
        jobs.append(HandJob(prompt(length), pages[:needed]))
        pages = pages[needed:]
    return jobs


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("page_size", [2, 5, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_ragged_batch_equal_transformers(
    models: dict[str, Path], family: str, page_size: int, threads: int
) -> None:
    executor = packed(models[family], page_size, threads)
    reference = model(models[family], family)
    jobs = jobs_of(page_size, room=1)
    # 1. two are decoded by hand-fed tokens while the others are read, and one is not read to its end
    step(executor, [(jobs[0], 1), (jobs[1], 5)])
    _, logits = executor.forward(plan_of([(jobs[0], 1), (jobs[1], 1), (jobs[2], 16), (jobs[4], 41), (jobs[3], 33)]))
    ended = (jobs[0], jobs[1], jobs[2], jobs[3])
    assert len(logits) == len(ended)
    for row, job in enumerate(ended):
        with torch.inference_mode():
            want = reference(torch.tensor([job.tokens])).logits[0, -1]
        torch.testing.assert_close(logits[row], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 33, 34])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_then_decode_give_the_greedy_tokens_of_transformers(
    models: dict[str, Path], family: str, chunk: int
) -> None:
    executor = packed(models[family], page_size=4)
    tokens = prompt(33)
    job = HandJob(tokens, scattered_pages(160, 12, seed=chunk))
    assert generate(executor, job, 12, chunk) == expected_tokens(model(models[family], family), tokens, 12)


def test_a_step_that_samples_nothing_still_writes_its_pages(models: dict[str, Path]) -> None:
    executor = packed(models["llama"], page_size=4)
    job = HandJob(prompt(20), scattered_pages(160, 8, seed=1))
    assert step(executor, [(job, 11)]) == [None]
    assert generate(executor, job, 4) == expected_tokens(model(models["llama"], "llama"), job.prompt, 4)


def test_threads_and_company_change_no_bit(models: dict[str, Path]) -> None:
    """A row's sums are taken in one order, whoever takes them and whatever else is in the batch."""
    outputs = []
    for threads in (1, 2, 4):
        executor = packed(models["qwen3"], 4, threads)
        jobs = jobs_of(4)
        _, logits = executor.forward(plan_of([(job, len(job.prompt)) for job in jobs]))
        outputs.append(logits.clone())
        alone = HandJob(jobs[1].prompt, jobs[1].pages)
        _, logits = executor.forward(plan_of([(alone, len(alone.prompt))]))
        torch.testing.assert_close(logits[0], outputs[0][1], atol=0, rtol=0)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_shape_that_cannot_be_packed_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", "llama")  # head_dim 8
    with pytest.raises(ConfigError, match="head_dim is a multiple of 16"):
        load_executor(directory, page_size=4, num_pages=8, linear="packed_fp16")
    assert load_executor(directory, page_size=4, num_pages=8, linear="auto")
