"""The packed form answers like the exact one on the demo model, once `twostroke model pull` has fetched it."""

from pathlib import Path

import pytest
import torch

from tests.model_builders import HandJob, plan_of, scattered_pages, step
from twostroke.engine.model.load import load_executor
from twostroke.engine.model.source import DEMO_NAME, default_cache_dir

TIE = 0.05
"""A gap between the two largest logits (they span some 40) under which rounding weights may swap them."""
NUM_TOKENS = 24


def prompts() -> list[list[int]]:
    """Ids of the plain vocabulary, behind the special ones at the front."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(100, 40000, (n,), generator=generator).tolist() for n in (1, 16, 47, 120)] + [
        list(range(100, 164)),
        [504, 260, 281, 253, 284, 504] * 8,
    ]


@pytest.fixture(scope="module")
def demo() -> Path:
    found = sorted(default_cache_dir().glob(f"{DEMO_NAME}-v*"))
    if not found:
        pytest.skip("the demo model is not in the cache: twostroke model pull demo")
    return found[-1]


@pytest.mark.slow
def test_packed_linears_give_the_greedy_tokens_of_float32(demo: Path) -> None:
    """Both forms read the exact form's tokens; each next token is the same, or the exact form was near a tie."""
    exact, packed = (
        load_executor(demo, page_size=16, num_pages=64, linear=form) for form in ("float32", "packed_fp16")
    )
    compared = 0
    for number, prompt in enumerate(prompts()):
        pages = scattered_pages(64, 12, seed=number)
        job = HandJob(prompt, pages)
        for _ in range(NUM_TOKENS):
            count = len(job.tokens) - job.num_computed
            _, logits = packed.forward(plan_of([(job, count)]))
            _, exact_logits = exact.forward(plan_of([(job, count)]))
            first, second = exact_logits[0].topk(2).values.tolist()
            if first - second > TIE:
                assert int(logits[0].argmax()) == int(exact_logits[0].argmax())
                compared += 1
            step(exact, [(job, count)])
    assert compared > 0.8 * NUM_TOKENS * len(prompts())
