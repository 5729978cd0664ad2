"""What a choice does when one of its two workers ends the job or is lost: the one mechanism of continuation. Pure.

    prefill lost, lease granted, no token yet   RENEW     the lease's epoch goes up, another prefill worker fills it
    prefill lost before it was asked            REPLACE   another is chosen when the lease comes
    prefill lost or failed, decode has started  CARRY_ON  it owns the request, and told the first token with it
    any other loss or failure before the end    CONTINUE  another pair, from the tokens delivered
    a job finished                              FINISH
    a grammar broke                             REFUSE    it would break on every worker

An answer whose end is known and whose tokens are all here needs nobody any more: every loss is CARRY_ON.
"""

from enum import Enum

from twostroke.cluster.core.messages import Outcome
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.request import Phase


class Side(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Reaction(Enum):
    CARRY_ON = "carry_on"
    REPLACE = "replace"
    RENEW = "renew"
    CONTINUE = "continue"
    FINISH = "finish"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Standing:
    """How an attempt stands when something happens to it."""

    phase: Phase
    leased: bool
    started: bool
    """The decode worker said that it owns the job, and which token is the first."""
    progressed: bool
    """A token of this attempt was delivered."""
    complete: bool
    """The end is known and every token up to it is here."""
    side_over: bool
    """The side concerned had ended its part already."""


def on_lost(side: Side, standing: Standing) -> Reaction:
    if standing.complete or standing.side_over:
        return Reaction.CARRY_ON
    if side is Side.DECODE:
        return Reaction.CONTINUE
    if standing.phase is Phase.RESERVING:
        return Reaction.REPLACE
    if standing.started:
        return Reaction.CARRY_ON
    if standing.leased and not standing.progressed:
        return Reaction.RENEW
    return Reaction.CONTINUE


def on_ended(side: Side, outcome: Outcome, standing: Standing) -> Reaction:
    if standing.complete:
        return Reaction.CARRY_ON
    if outcome is Outcome.FINISHED:
        return Reaction.FINISH
    if outcome is Outcome.BROKEN_GRAMMAR:
        return Reaction.REFUSE
    if side is Side.PREFILL and (outcome is Outcome.HANDED_OVER or standing.started):
        return Reaction.CARRY_ON
    return Reaction.CONTINUE
