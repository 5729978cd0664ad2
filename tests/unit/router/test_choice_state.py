"""One choice: tokens strictly in order, phases through the table, attempts that forget what came early."""

import pytest

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import PromptLogprobs, TokenRun
from twostroke.cluster.core.request import Phase
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.router.choice_state import MAX_EARLY, ChoiceState, TokensConflict


def choice(max_tokens: int = 1000) -> ChoiceState:
    state = ChoiceState(RequestId("r"), 0, SamplingParams(max_tokens=max_tokens, end_token_ids=(99,)), since=0.0)
    state.begin_attempt()
    return state


def run(state: ChoiceState, first: int, *tokens: int) -> TokenRun:
    return TokenRun(state.job, first, tokens)


def test_tokens_are_delivered_in_order_whatever_order_they_come_in() -> None:
    state = choice()
    assert state.accept(run(state, 1, 11, 12)) == ()
    assert state.accept(run(state, 0, 10)) == (10, 11, 12)
    assert state.accept(run(state, 3, 13)) == (13,)


def test_equal_duplicates_are_dropped_and_counted() -> None:
    state = choice()
    state.accept(run(state, 0, 10, 11))
    assert state.accept(run(state, 0, 10, 11, 12)) == (12,)
    assert state.duplicates == 2


def test_a_differing_duplicate_is_a_conflict_also_among_early_ones() -> None:
    state = choice()
    state.accept(run(state, 0, 10))
    with pytest.raises(TokensConflict):
        state.accept(run(state, 0, 9))
    state.accept(run(state, 5, 15))
    with pytest.raises(TokensConflict):
        state.accept(run(state, 5, 16))


def test_early_tokens_are_bounded() -> None:
    state = choice()
    state.accept(run(state, 1, *range(MAX_EARLY)))
    with pytest.raises(TokensConflict):
        state.accept(run(state, 1 + MAX_EARLY, 0))


def test_a_new_attempt_keeps_what_was_delivered_and_forgets_what_was_early() -> None:
    state = choice()
    state.accept(run(state, 0, 10))
    state.accept(run(state, 2, 12))
    first = state.job
    state.begin_attempt()
    assert state.job.attempt == first.attempt + 1
    assert not state.progressed
    assert state.accept(run(state, 1, 21)) == (21,)
    assert state.tokens == [10, 21]


def test_phases_follow_the_table_and_their_times_add_up() -> None:
    state = choice()
    for at, phase in enumerate([Phase.RESERVING, Phase.PREFILLING, Phase.QUEUED, Phase.PREFILLING, Phase.FINISHED], 1):
        state.move(phase, float(at * at))
    assert sum(state.spent_s.values()) == 25.0
    assert not state.live
    with pytest.raises(InternalError):
        state.move(Phase.QUEUED, 30.0)


def test_the_end_follows_from_the_tokens() -> None:
    state = choice(max_tokens=2)
    assert state.natural_end() is None
    state.accept(run(state, 0, 10))
    assert state.natural_end() is None
    assert state.one_to_go
    state.accept(run(state, 1, 11))
    assert state.natural_end() is FinishReason.LENGTH
    stopped = choice()
    stopped.accept(run(stopped, 0, 99))
    assert stopped.natural_end() is FinishReason.STOP


# -------------------------------------------------------------------------------------- log-probabilities


def told(*values: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(value, 1) for value in values)


def scored() -> ChoiceState:
    state = ChoiceState(RequestId("r"), 0, SamplingParams(max_tokens=9, logprobs=0, prompt_logprobs=0), since=0.0)
    state.begin_attempt()
    return state


def test_log_probabilities_go_with_their_tokens_whatever_order_they_come_in() -> None:
    state = scored()
    assert state.accept(TokenRun(state.job, 1, (11, 12), told(-1.0, -2.0))) == ()
    assert state.accept(TokenRun(state.job, 0, (10,), told(-0.5))) == (10, 11, 12)
    assert state.accept(TokenRun(state.job, 0, (10, 11), told(-7.0, -7.0))) == ()
    assert state.take_logprobs(0, 2) == told(-0.5, -1.0)
    assert state.take_logprobs(2, 3) == told(-2.0)


def test_a_token_without_its_log_probability_is_a_conflict() -> None:
    state = scored()
    with pytest.raises(TokensConflict):
        state.accept(TokenRun(state.job, 0, (10,)))


def test_those_of_early_tokens_are_forgotten_with_their_attempt() -> None:
    state = scored()
    state.accept(TokenRun(state.job, 1, (11,), told(-9.0)))
    state.begin_attempt()
    assert state.accept(TokenRun(state.job, 0, (10, 11), told(-1.0, -2.0))) == (10, 11)
    assert state.take_logprobs(0, 2) == told(-1.0, -2.0)


def test_a_prompts_come_in_order_and_once() -> None:
    state = scored()
    state.accept_prompt(PromptLogprobs(state.job, 1, told(-1.0, -2.0)))
    state.accept_prompt(PromptLogprobs(state.job, 1, told(-1.0, -2.0, -3.0)))
    state.accept_prompt(PromptLogprobs(state.job, 2, told(-2.0)))
    assert state.prompt_logprobs == list(told(-1.0, -2.0, -3.0))
    with pytest.raises(TokensConflict):
        state.accept_prompt(PromptLogprobs(state.job, 5, told(-5.0)))
