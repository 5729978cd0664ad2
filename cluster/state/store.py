"""Which implementation of the cluster's memory a process uses."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from twostroke.cluster.config import Config
from twostroke.cluster.core.clock import SystemClock
from twostroke.cluster.state.base import EventLog, Registry
from twostroke.cluster.state.memory import MemoryEventLog, MemoryRegistry
from twostroke.cluster.state.redis import RedisClient, RedisEventLog, RedisRegistry


@dataclass(frozen=True, slots=True)
class StateStore:
    registry: Registry
    events: EventLog


@contextlib.asynccontextmanager
async def open_state(config: Config) -> AsyncIterator[StateStore]:
    """Redis where the configuration names one, else this process's own memory (a worker on its own)."""
    if not config.redis.url:
        memory = MemoryRegistry(SystemClock(), config.redis.registration_ttl_s)
        yield StateStore(memory, MemoryEventLog(config.redis.stream_maxlen))
        return
    client = RedisClient.from_config(config)
    try:
        yield StateStore(
            RedisRegistry(client, config.redis.registration_ttl_s),
            RedisEventLog(client, config.redis.stream_maxlen),
        )
    finally:
        await client.close()
