"""Every loss and early end, in every standing, has exactly one reaction."""

import pytest

from twostroke.cluster.core.messages import Outcome
from twostroke.cluster.core.request import Phase
from twostroke.router.loss import Reaction, Side, Standing, on_ended, on_lost


def standing(
    phase: Phase = Phase.PREFILLING,
    *,
    leased: bool = True,
    started: bool = False,
    progressed: bool = False,
    complete: bool = False,
    side_over: bool = False,
) -> Standing:
    return Standing(phase, leased, started, progressed, complete, side_over)


@pytest.mark.parametrize(
    ("side", "how", "expected"),
    [
        (Side.PREFILL, standing(Phase.RESERVING, leased=False), Reaction.REPLACE),
        (Side.PREFILL, standing(Phase.PREFILLING), Reaction.RENEW),
        (Side.PREFILL, standing(Phase.PREFILLING, leased=False), Reaction.CONTINUE),
        (Side.PREFILL, standing(Phase.TRANSFERRING, progressed=True), Reaction.CONTINUE),
        (Side.PREFILL, standing(Phase.DECODING, started=True, progressed=True), Reaction.CARRY_ON),
        (Side.PREFILL, standing(Phase.DECODING, started=True), Reaction.CARRY_ON),
        (Side.PREFILL, standing(Phase.DECODING, started=True, side_over=True), Reaction.CARRY_ON),
        (Side.DECODE, standing(Phase.RESERVING, leased=False), Reaction.CONTINUE),
        (Side.DECODE, standing(Phase.PREFILLING), Reaction.CONTINUE),
        (Side.DECODE, standing(Phase.TRANSFERRING, progressed=True), Reaction.CONTINUE),
        (Side.DECODE, standing(Phase.DECODING, started=True, progressed=True), Reaction.CONTINUE),
        (Side.DECODE, standing(Phase.DECODING, started=True, progressed=True, complete=True), Reaction.CARRY_ON),
        (Side.DECODE, standing(Phase.DECODING, started=True, side_over=True), Reaction.CARRY_ON),
    ],
)
def test_reaction_to_a_lost_worker(side: Side, how: Standing, expected: Reaction) -> None:
    assert on_lost(side, how) is expected


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("outcome", Outcome)
def test_a_complete_answer_needs_nobody(side: Side, outcome: Outcome) -> None:
    assert on_ended(side, outcome, standing(complete=True)) is Reaction.CARRY_ON


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.EXPIRED, Outcome.TRANSFER_FAILED, Outcome.FAILED])
def test_a_failed_prefill_side_matters_only_before_the_hand_over(outcome: Outcome) -> None:
    before = standing(Phase.TRANSFERRING, progressed=True)
    after = standing(Phase.DECODING, started=True)
    assert on_ended(Side.PREFILL, outcome, before) is Reaction.CONTINUE
    assert on_ended(Side.PREFILL, outcome, after) is Reaction.CARRY_ON


def test_ends_on_the_good_way() -> None:
    assert on_ended(Side.PREFILL, Outcome.HANDED_OVER, standing(progressed=True)) is Reaction.CARRY_ON
    assert on_ended(Side.PREFILL, Outcome.FINISHED, standing(progressed=True)) is Reaction.FINISH
    assert on_ended(Side.DECODE, Outcome.FINISHED, standing(Phase.DECODING, started=True)) is Reaction.FINISH
    assert on_ended(Side.DECODE, Outcome.PREEMPTED, standing(Phase.DECODING, started=True)) is Reaction.CONTINUE


@pytest.mark.parametrize("side", Side)
def test_a_broken_grammar_is_the_clients_to_mend(side: Side) -> None:
    assert on_ended(side, Outcome.BROKEN_GRAMMAR, standing(progressed=True)) is Reaction.REFUSE
