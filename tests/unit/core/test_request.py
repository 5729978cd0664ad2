"""The transition table of a choice."""

import pytest

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.request import ENDS, LIVE, TRANSITIONS, Phase, advance

LIFE = [Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING, Phase.FINISHED]


def test_the_whole_life_is_legal() -> None:
    for current, to in zip(LIFE, LIFE[1:], strict=False):
        assert advance(current, to) is to


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase in LIVE])
def test_every_live_phase_may_end_in_every_way_and_go_back_to_the_queue(phase: Phase) -> None:
    assert TRANSITIONS[phase] >= ENDS
    assert (Phase.QUEUED in TRANSITIONS[phase]) == (phase is not Phase.QUEUED)


@pytest.mark.parametrize("end", [phase for phase in Phase if phase in ENDS])
def test_nothing_follows_an_end(end: Phase) -> None:
    for to in Phase:
        with pytest.raises(InternalError):
            advance(end, to)


@pytest.mark.parametrize(
    ("current", "to"),
    [
        (Phase.QUEUED, Phase.DECODING),
        (Phase.RESERVING, Phase.DECODING),
        (Phase.DECODING, Phase.PREFILLING),
        (Phase.QUEUED, Phase.QUEUED),
    ],
)
def test_shortcuts_are_illegal(current: Phase, to: Phase) -> None:
    with pytest.raises(InternalError, match="illegal"):
        advance(current, to)
