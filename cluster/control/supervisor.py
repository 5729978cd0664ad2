"""Which processes should start, drain or be forgotten: pure, from what is wanted and what is there.

    wanted: how many of each role      there: members (worker id, role, state, age)
                    └────────── reconcile ──────────┘
                                    v
                    [Start | Drain | Forget], in the order in which they may run

A member's life as its host actor reports it (`control.child`):

    STARTING -> READY -> (ends) -> BACKOFF -> STARTING ...     the same worker id, a new incarnation
    any -> DRAINING -> STOPPED -> forgotten                    scale down, drain, shutdown
    BACKOFF -> FAILED                                          gave up; an operator's scale tries again
    any -> LOST                                                its host actor died; started anew under the same id

The state server comes first: nothing else starts before it has been ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from twostroke.cluster.core.ids import WorkerId


class MemberRole(Enum):
    STATE = "state"
    """The embedded Valkey server."""
    DECODE = "decode"
    PREFILL = "prefill"
    ROUTER = "router"


class MemberState(Enum):
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


STAYING = frozenset({MemberState.STARTING, MemberState.READY, MemberState.BACKOFF, MemberState.FAILED})


@dataclass(frozen=True, slots=True)
class Member:
    worker_id: WorkerId
    role: MemberRole
    state: MemberState
    order: int
    """Larger is newer; never the same for two members."""


@dataclass(frozen=True, slots=True)
class Start:
    worker_id: WorkerId
    role: MemberRole


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop admitting, finish what is there, then end."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Forget:
    """Its process and its host have ended; the id is free again."""

    worker_id: WorkerId


Action = Start | Drain | Forget


def reconcile(desired: Mapping[MemberRole, int], members: Iterable[Member]) -> list[Action]:
    """Actions that bring `members` closer to `desired`; empty when nothing is to do. Does not mutate.

    Too many: those that do not serve leave first, then the newest. A draining member counts for nothing, but
    keeps its id until it is forgotten. A lost member that is still wanted is started under its own id.
    """
    present = list(members)
    actions: list[Action] = [
        Forget(member.worker_id) for member in present if member.state in (MemberState.STOPPED, MemberState.LOST)
    ]
    state_is_up = desired.get(MemberRole.STATE, 0) == 0 or any(
        member.role is MemberRole.STATE and member.state is MemberState.READY for member in present
    )
    for role in MemberRole:
        of_role = [member for member in present if member.role is role]
        staying = [member for member in of_role if member.state in STAYING]
        surplus = len(staying) - desired.get(role, 0)
        if surplus > 0:
            leaving = sorted(staying, key=lambda member: (member.state is MemberState.READY, -member.order))
            actions += [Drain(member.worker_id) for member in leaving[:surplus]]
        elif surplus < 0 and (state_is_up or role is MemberRole.STATE):
            actions += [Start(worker_id, role) for worker_id in _vacant(role, of_role, -surplus)]
    return actions


def settled(desired: Mapping[MemberRole, int], members: Iterable[Member]) -> bool:
    """True when exactly the wanted members are there and all of them are ready."""
    present = list(members)
    return all(member.state is MemberState.READY for member in present) and all(
        sum(member.role is role for member in present) == desired.get(role, 0) for role in MemberRole
    )


def role_of(worker_id: WorkerId) -> MemberRole:
    """Of an id that `reconcile` gave. Raises ValueError for another."""
    return MemberRole(worker_id.rpartition("-")[0])


def _vacant(role: MemberRole, of_role: list[Member], count: int) -> list[WorkerId]:
    """The lowest free ids. A stopped or lost member's id is free: its Forget runs before any Start."""
    gone = (MemberState.STOPPED, MemberState.LOST)
    taken = {member.worker_id for member in of_role if member.state not in gone}
    vacant: list[WorkerId] = []
    index = 0
    while len(vacant) < count:
        worker_id = WorkerId(f"{role.value}-{index}")
        if worker_id not in taken:
            vacant.append(worker_id)
        index += 1
    return vacant
