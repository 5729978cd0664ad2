"""What the cluster remembers outside its processes: who is there, which pages they hold, how many there should be.

    Registry      a worker registers when ready, renews every third of the TTL, deregisters when it leaves;
                  an entry that nobody renews expires (invariant 15: an entry belongs to an incarnation)
    EventLog      a worker publishes its prefix batches; routers read those after the sequence they know
    DesiredSizes  the operator writes how many workers of each role there should be; the supervisor reads it

All of it is hints: losing it costs placement quality and discovery of new workers, never a running request
(invariant 20), and it is never asked on the token path. Every method is bounded in time (a few seconds) and raises
`Unavailable` when the store cannot be reached; callers carry on with what they know.

`redis` is the real one, `memory` the fake; both pass `tests/component/state/test_contract.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import WorkerInfo

READ_LIMIT = 256
"""Most batches of one worker that one `EventLog.read` returns."""


class Registry(Protocol):
    async def register(self, info: WorkerInfo) -> None:
        """Enter or replace the incarnation's entry for one TTL. Idempotent."""
        ...

    async def renew(self, info: WorkerInfo) -> None:
        """Keep the entry for another TTL; enters it again when the store has forgotten it."""
        ...

    async def deregister(self, incarnation: Incarnation) -> None:
        """Idempotent."""
        ...

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Every live entry, in order of worker id, then incarnation. Entries that cannot be read are left out."""
        ...


class EventLog(Protocol):
    async def publish(self, batch: PrefixBatch) -> None:
        """Append. Publishing a sequence again, or out of order, is a no-op: the log of a worker is ascending."""
        ...

    async def read(self, after: Mapping[Incarnation, int]) -> tuple[PrefixBatch, ...]:
        """For each incarnation, up to `READ_LIMIT` batches with a larger sequence, ascending.

        The log is bounded and expires, so the first may be later than `after + 1`: a gap, which a snapshot heals.
        """
        ...


@dataclass(frozen=True, slots=True)
class PoolSizes:
    prefill: int
    decode: int


class DesiredSizes(Protocol):
    async def get(self) -> PoolSizes | None:
        """None when nobody has set them (or the store lost them)."""
        ...

    async def set(self, sizes: PoolSizes) -> None: ...
