"""Under any order, splitting and duplication of two workers' token messages, tokens come out once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.messages import TokenRun
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.router.choice_state import MAX_EARLY, ChoiceState

TOKENS = tuple(range(100, 140))


@st.composite
def deliveries(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Runs `start, end` that cover all of TOKENS at least once, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, len(TOKENS) - 1))))
    runs = list(zip([0, *cuts], [*cuts, len(TOKENS)], strict=True))
    starts = st.integers(0, len(TOKENS) - 1)
    repeats = [(start, draw(st.integers(start + 1, len(TOKENS)))) for start in draw(st.lists(starts, max_size=5))]
    return draw(st.permutations(runs + repeats))


@given(deliveries())
def test_tokens_come_out_once_and_in_order(runs: list[tuple[int, int]]) -> None:
    assert len(TOKENS) <= MAX_EARLY
    state = ChoiceState(RequestId("r"), 0, SamplingParams(max_tokens=1000), since=0.0)
    job = state.begin_attempt()
    delivered: list[int] = []
    for start, end in runs:
        delivered += state.accept(TokenRun(job, start, TOKENS[start:end]))
        assert delivered == list(TOKENS[: len(delivered)])
    assert delivered == list(TOKENS)
