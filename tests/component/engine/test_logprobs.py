"""Log-probabilities against `torch.log_softmax`, and bias against its definition."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.model_builders import HandJob, plan_of, scattered_pages
from tests.tiny_models import VOCAB_SIZE, make_tiny_model, tiny_config
from twostroke.cluster.core.logprobs import LOWEST
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.logprobs import pick, raw_logprobs
from twostroke.engine.model.config import parse_model_config
from twostroke.engine.model.load import load_executor
from twostroke.engine.model.packed_decoder import packing_obstacle
from twostroke.engine.plan import Plan, SampleInput, ScoreInput
from twostroke.engine.sampler import sample

BASE = SamplingParams(max_tokens=100)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_values_ranks_and_the_best_equal_log_softmax(top: int) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(top)) * 4
    tokens = [0, 299, 17, *logits[3:].argmax(dim=-1).tolist()]
    want = torch.log_softmax(logits.double(), dim=-1)
    for row, told in enumerate(pick(raw_logprobs(logits), tokens, [top] * 7)):
        assert told.logprob == pytest.approx(float(want[row, tokens[row]]), abs=1e-5)
        assert told.rank == 1 + int((want[row] > want[row, tokens[row]]).sum())
        best = want[row].topk(top)
        assert told.top_ids == tuple(best.indices.tolist())
        assert told.top == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_has_as_many_as_it_asked_for_and_no_more_than_there_are_tokens() -> None:
    told = pick(raw_logprobs(torch.zeros(3, 4)), [1, 2, 3], [0, 2, 20])
    assert [value.top_ids for value in told] == [(), (0, 1), (0, 1, 2, 3)]
    assert {value.rank for value in told} == {1}


def test_what_cannot_be_is_told_as_a_finite_number() -> None:
    [told] = pick(raw_logprobs(torch.tensor([[0.0, float("-inf")]])), [1], [2])
    assert (told.logprob, told.top[1]) == (LOWEST, LOWEST)


LOGITS = [1.0, 3.0, 2.5, -1.0]


@pytest.mark.parametrize(
    ("bias", "want"),
    [({2: 1.0}, 2), ({1: -100.0}, 2), ({3: 100.0}, 3), ({1: -0.4, 2: -0.1}, 1), ({1: -0.6, 900: 5.0}, 2)],
    ids=str,
)
def test_a_bias_is_added_before_the_choice(bias: dict[int, float], want: int) -> None:
    params = replace(BASE, logit_bias=tuple(bias.items()))
    assert sample(torch.tensor([LOGITS]), [SampleInput(params, (), ())]) == [want]


def test_penalties_work_on_what_a_bias_left() -> None:
    # 3.0 + 1.0 = 4.0, halved for being in the prompt: 2.0, under 2.5.
    params = replace(BASE, logit_bias=((1, 1.0),), repetition_penalty=2.0)
    assert sample(torch.tensor([LOGITS]), [SampleInput(params, (1,), ())]) == [2]


NO_PACKING = pytest.mark.skipif(
    bool(packing_obstacle(parse_model_config(tiny_config("qwen3")))), reason="this CPU has no packed form"
)


@pytest.mark.parametrize("linear", ["float32", pytest.param("packed_fp16", marks=NO_PACKING)])
def test_a_step_tells_the_raw_distribution_of_prompts_and_samples(tmp_path: Path, linear: str) -> None:
    directory = make_tiny_model(tmp_path, "qwen3", packable=True)
    executor = load_executor(directory, page_size=4, num_pages=64, linear=linear)
    asked = replace(BASE, logprobs=3, temperature=1.5, repetition_penalty=1.7, logit_bias=((9, 50.0),), seed=5)
    pages = scattered_pages(64, 30, seed=1)
    jobs = [
        HandJob(list(range(10, 21)), pages[:10], asked, "scored"),
        HandJob(list(range(30, 37)), pages[10:20], BASE, "plain"),
        HandJob(list(range(50, 59)), pages[20:], replace(BASE, logprobs=0), "zero"),
    ]
    whole = executor.forward(scored(plan_of([(job, len(job.tokens)) for job in jobs]), {}))[1].clone()
    plan = scored(plan_of([(jobs[0], 11), (jobs[1], 5), (jobs[2], 9)]), {0: (2, jobs[0].prompt[1:]), 1: (1, [31, 33])})
    result = executor.launch(plan).result()

    # 1. the sampled rows' own, whatever was done to the logits afterwards
    assert result.tokens[0] == 9
    assert set(result.logprobs) == {plan.jobs[0], plan.jobs[2]}
    for row, top in ((0, 3), (2, 0)):
        told = result.logprobs[plan.jobs[row]]
        want = torch.log_softmax(whole[row], dim=-1)
        assert told.logprob == pytest.approx(float(want[result.tokens[row] or 0]), abs=1e-4)
        assert told.top == pytest.approx(want.topk(top).values.tolist(), abs=1e-4)

    # 2. the prompts', each as if it were the last token of a shorter prompt
    for row, targets in ((0, jobs[0].prompt[1:]), (1, [31, 33])):
        told_of_prompt = result.scores[plan.jobs[row]]
        assert len(told_of_prompt) == len(targets)
        for length, (target, told) in enumerate(zip(targets, told_of_prompt, strict=True), 1):
            short = HandJob(jobs[row].prompt[:length], jobs[row].pages)
            want = torch.log_softmax(executor.forward(plan_of([(short, length)]))[1][0], dim=-1)
            assert told.logprob == pytest.approx(float(want[target]), abs=1e-4)
            assert len(told.top) == (2 if row == 0 else 1)
    assert all(len(told.top_ids) <= VOCAB_SIZE for told in result.logprobs.values())


def scored(plan: Plan, score: dict[int, tuple[int, list[int]]]) -> Plan:
    plan.score.update({row: ScoreInput(top, targets) for row, (top, targets) in score.items()})
    return plan
