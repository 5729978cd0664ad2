"""Sampling against definitions written out in plain Python over a small vocabulary."""

import math
from dataclasses import replace

import pytest
import torch

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.random import uniform
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.plan import SampleInput
from twostroke.engine.sampler import sample

LOGITS = [1.0, 3.0, 2.5, -1.0, 3.0, 0.0, 2.0]
BASE = SamplingParams(max_tokens=100)


def draw(params: SamplingParams, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> int:
    return sample(torch.tensor([LOGITS]), [SampleInput(params, prompt, output)])[0]


def inverse_cdf(logits: list[float], params: SamplingParams, index: int) -> int:
    """The documented rule in plain Python: top_k, top_p of the rest, min_p, then the CDF in id order."""
    weights = [math.exp((value - max(logits)) / params.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: params.top_k or len(order)]
    mass, kept = sum(weights[token] for token in order), []
    for token in order:
        if sum(weights[before] for before in kept) < params.top_p * mass:
            kept.append(token)
    kept = sorted(token for token in kept if weights[token] >= params.min_p)
    target = uniform(params.seed, index) * sum(weights[token] for token in kept)
    running = 0.0
    for token in kept:
        running += weights[token]
        if running > target:
            return token
    return kept[-1]


def test_greedy_takes_the_smallest_id_among_the_largest() -> None:
    assert draw(BASE) == 1


@pytest.mark.parametrize(
    "change",
    [{}, {"temperature": 2.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8, "min_p": 0.2}],
    ids=str,
)
def test_draws_equal_the_reference_for_every_seed(change: dict[str, float]) -> None:
    params = replace(BASE, **{"temperature": 0.8, **change})  # type: ignore[arg-type]
    for seed in range(300):
        seeded = replace(params, seed=seed)
        assert draw(seeded, output=(0,) * (seed % 3)) == inverse_cdf(LOGITS, seeded, seed % 3)


def test_a_wide_nucleus_over_a_large_vocabulary_equals_the_reference() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for seed in range(5):
        params = replace(BASE, temperature=1.5, top_p=0.97, seed=seed)
        got = sample(logits.clone()[None], [SampleInput(params, (), ())])[0]
        assert got == inverse_cdf(logits.double().tolist(), params, 0)


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    inputs = [
        SampleInput(replace(BASE, temperature=temperature, seed=row, top_k=row % 3 * 5), (1, 2), (3,) * row)
        for row, temperature in enumerate((0.0, 0.7, 1.3, 0.0, 1.0, 2.0))
    ]
    together = sample(logits.clone(), inputs)
    assert together == [sample(logits[row : row + 1].clone(), [item])[0] for row, item in enumerate(inputs)]


def test_penalties_count_the_tokens_that_they_should() -> None:
    # Repetition: prompt and output. 1 and 4 lead; 1 in the prompt halves it, so 4 wins; both seen leaves 2.
    assert draw(replace(BASE, repetition_penalty=2.0), prompt=(1, 1)) == 4
    assert draw(replace(BASE, repetition_penalty=2.0), prompt=(1,), output=(4,)) == 2
    # Presence and frequency: output alone.
    for name in ("presence_penalty", "frequency_penalty"):
        params = replace(BASE, **{name: 0.4})  # type: ignore[arg-type]
        assert draw(params, prompt=(1, 1, 1)) == 1
        assert draw(params, output=(1,)) == 4
    # Presence once however often; frequency each time: 3 - 0.4 * 2 < 2.5 < 3 - 0.4.
    assert draw(replace(BASE, presence_penalty=0.4), output=(1, 1, 4, 4)) == 1
    assert draw(replace(BASE, frequency_penalty=0.4), output=(1, 1, 4, 4)) == 2


def test_ends_are_masked_below_min_tokens_only() -> None:
    params = replace(BASE, min_tokens=2, end_token_ids=(1, 4, 9999))
    assert draw(params) == 2
    assert draw(params, output=(0,)) == 2
    assert draw(params, output=(0, 0)) == 1


def test_logits_that_are_not_finite_raise_instead_of_becoming_a_token() -> None:
    with pytest.raises(InternalError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), [SampleInput(BASE, (), ())])
