"""The life of a choice: one transition table, one `advance()`.

QUEUED -> RESERVING -> PREFILLING -> TRANSFERRING -> DECODING -> FINISHED | CANCELLED | FAILED

QUEUED -> PREFILLING       no lease needed: a one-token answer, or local prefill on the decode worker
PREFILLING -> DECODING     local prefill: nothing is transferred
PREFILLING -> FINISHED     the first token is the end (also TRANSFERRING, when it ends while pages travel)
any live phase -> QUEUED   continuation: a worker was lost or refused; attempt + 1
any live phase -> an end
"""

from enum import StrEnum

from twostroke.cluster.core.errors import InternalError


class Phase(StrEnum):
    """Strings, since they are looked up at every move: `Enum` hashes its members in Python."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDS = frozenset({Phase.FINISHED, Phase.CANCELLED, Phase.FAILED})
LIVE = frozenset(Phase) - ENDS

_FORWARD: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.RESERVING, Phase.PREFILLING}),
    Phase.RESERVING: frozenset({Phase.PREFILLING}),
    Phase.PREFILLING: frozenset({Phase.TRANSFERRING, Phase.DECODING}),
    Phase.TRANSFERRING: frozenset({Phase.DECODING}),
    Phase.DECODING: frozenset(),
}
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    phase: (_FORWARD[phase] | ENDS | ({Phase.QUEUED} - {phase})) if phase in LIVE else frozenset() for phase in Phase
}


def advance(current: Phase, to: Phase) -> Phase:
    """`to`, if the table allows the move. Raises InternalError otherwise; nothing else assigns a phase."""
    if to not in TRANSITIONS[current]:
        raise InternalError(f"illegal phase change {current.value} -> {to.value}")
    return to
