"""The cluster's memory within one process: the shipped fake, and what a cluster in one process uses."""

from collections import deque
from collections.abc import Mapping

from twostroke.cluster.core.clock import Clock
from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.state.base import READ_LIMIT, PoolSizes


class MemoryRegistry:
    """Implements `base.Registry`; entries expire by `clock`."""

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._entries: dict[Incarnation, tuple[float, WorkerInfo]] = {}

    async def register(self, info: WorkerInfo) -> None:
        self._entries[info.incarnation] = (self._clock.now() + self._ttl_s, info)

    async def renew(self, info: WorkerInfo) -> None:
        await self.register(info)

    async def deregister(self, incarnation: Incarnation) -> None:
        self._entries.pop(incarnation, None)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        now = self._clock.now()
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0] > now}
        live = (info for _, info in self._entries.values())
        return tuple(sorted(live, key=lambda info: (info.worker_id, info.incarnation)))


class MemoryEventLog:
    """Implements `base.EventLog`; keeps the last `maxlen` batches of each worker."""

    def __init__(self, maxlen: int) -> None:
        self._maxlen = maxlen
        self._logs: dict[Incarnation, deque[PrefixBatch]] = {}

    async def publish(self, batch: PrefixBatch) -> None:
        log = self._logs.setdefault(batch.incarnation, deque(maxlen=self._maxlen))
        if not log or batch.sequence > log[-1].sequence:
            log.append(batch)

    async def read(self, after: Mapping[Incarnation, int]) -> tuple[PrefixBatch, ...]:
        found: list[PrefixBatch] = []
        for incarnation, sequence in after.items():
            later = [batch for batch in self._logs.get(incarnation, ()) if batch.sequence > sequence]
            found.extend(later[:READ_LIMIT])
        return tuple(found)


class MemoryDesiredSizes:
    """Implements `base.DesiredSizes`."""

    def __init__(self) -> None:
        self._sizes: PoolSizes | None = None

    async def get(self) -> PoolSizes | None:
        return self._sizes

    async def set(self, sizes: PoolSizes) -> None:
        self._sizes = sizes
