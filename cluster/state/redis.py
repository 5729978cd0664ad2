"""The cluster's memory in Redis or Valkey.

    {ns}:workers               set of incarnations that may be registered
    {ns}:worker:<incarnation>  one registry entry (JSON), expires with its TTL
    {ns}:events:<incarnation>  stream of prefix batches, entry id `<sequence>-0`, MAXLEN ~, expires
    {ns}:sizes                 hash with the desired pool sizes

`ns` holds the cluster's name in a hash tag, so all keys of a cluster live in one slot.

Life of a command: run with a timeout; when the connection broke or the server turned read-only (a failover that
kept the connection, FIELD-REPORTS F7) drop the pool's connections, wait a little, connect anew; after
`_ATTEMPTS` raise `Unavailable`. Every command here may be repeated safely.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import redis.asyncio
import structlog
from redis.exceptions import ConnectionError, ReadOnlyError, ResponseError, TimeoutError

from twostroke.cluster.config import Config
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.state.base import READ_LIMIT, PoolSizes
from twostroke.cluster.state.codec import dump_batch, dump_worker, load_batch, load_worker

log = structlog.get_logger(__name__)

COMMAND_TIMEOUT_S = 1.0
STREAM_TTL_S = 600.0
"""A stream that nobody appends to is gone after this; routers that are in step do not miss it."""
_ATTEMPTS = 3
_BACKOFF_S = 0.05
_MAX_CONNECTIONS = 16

Answer = TypeVar("Answer")


class RedisClient:
    """Owns the connections of one process to one server. Close it once."""

    def __init__(self, url: str, namespace: str) -> None:
        self.namespace = namespace
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=COMMAND_TIMEOUT_S,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            max_connections=_MAX_CONNECTIONS,
        )

    @classmethod
    def from_config(cls, config: Config) -> "RedisClient":
        return cls(config.redis.url, f"{config.redis.prefix}:{{{config.cluster}}}")

    def key(self, *parts: str) -> str:
        return ":".join((self.namespace, *parts))

    async def run(self, command: Callable[["redis.asyncio.Redis"], Awaitable[Answer]]) -> Answer:
        """Run an idempotent command. Raises Unavailable when the server cannot be used."""
        failure = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation that meets the answer.
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    return await command(self._redis)
            except (ConnectionError, TimeoutError, ReadOnlyError, OSError) as error:
                # The built-in TimeoutError of asyncio.timeout is an OSError.
                failure = f"{type(error).__name__}: {error}"
                await self._redis.connection_pool.disconnect(inuse_connections=False)
        raise Unavailable(f"the state store cannot be used: {failure}")

    async def ping(self) -> None:
        """Raises Unavailable."""
        await self.run(lambda redis: redis.ping())

    async def close(self) -> None:
        await self._redis.aclose()


class RedisRegistry:
    """Implements `base.Registry`."""

    def __init__(self, client: RedisClient, ttl_s: float) -> None:
        self._client = client
        self._ttl_ms = int(ttl_s * 1000)

    def _entry(self, incarnation: str) -> str:
        return self._client.key("worker", incarnation)

    async def register(self, info: WorkerInfo) -> None:
        async def command(redis: "redis.asyncio.Redis") -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.set(self._entry(info.incarnation), dump_worker(info), px=self._ttl_ms)
                pipe.sadd(self._client.key("workers"), info.incarnation)
                await pipe.execute()

        await self._client.run(command)

    async def renew(self, info: WorkerInfo) -> None:
        # Written in full: a server that was restarted empty learns of the worker again within a third of a TTL.
        await self.register(info)

    async def deregister(self, incarnation: Incarnation) -> None:
        async def command(redis: "redis.asyncio.Redis") -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._entry(incarnation))
                pipe.srem(self._client.key("workers"), incarnation)
                await pipe.execute()

        await self._client.run(command)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        entries = await self._client.run(self._entries)
        found: list[WorkerInfo] = []
        for incarnation, data in entries.items():
            try:
                found.append(load_worker(data))
            except ValueError as error:
                log.warning("registry_entry_unreadable", incarnation=incarnation, error=str(error))
        return tuple(sorted(found, key=lambda info: (info.worker_id, info.incarnation)))

    async def _entries(self, redis: "redis.asyncio.Redis") -> dict[str, bytes]:
        members: set[Any] = await redis.smembers(self._client.key("workers"))
        incarnations: list[str] = [member.decode() for member in members]
        if not incarnations:
            return {}
        values: list[Any] = await redis.mget([self._entry(incarnation) for incarnation in incarnations])
        pairs = list(zip(incarnations, values, strict=True))
        expired = [incarnation for incarnation, value in pairs if value is None]
        if expired:
            # A worker that registers in this instant is forgotten until it renews, which enters it again.
            await redis.srem(self._client.key("workers"), *expired)
        return {incarnation: value for incarnation, value in pairs if value is not None}


class RedisEventLog:
    """Implements `base.EventLog`: one stream an incarnation, its entry ids are the batches' sequence numbers."""

    def __init__(self, client: RedisClient, maxlen: int) -> None:
        self._client = client
        self._maxlen = maxlen

    def _stream(self, incarnation: str) -> str:
        return self._client.key("events", incarnation)

    async def publish(self, batch: PrefixBatch) -> None:
        stream = self._stream(batch.incarnation)
        fields: dict[Any, Any] = dict(dump_batch(batch))

        async def command(redis: "redis.asyncio.Redis") -> None:
            async with redis.pipeline(transaction=False) as pipe:
                pipe.xadd(stream, fields, id=f"{batch.sequence}-0", maxlen=self._maxlen, approximate=True)
                pipe.pexpire(stream, int(STREAM_TTL_S * 1000))
                added, _ = await pipe.execute(raise_on_error=False)
            if isinstance(added, ResponseError) and "equal or smaller" in str(added):
                return  # There already: a repeat after a lost answer.
            if isinstance(added, Exception):
                raise added

        await self._client.run(command)

    async def read(self, after: Mapping[Incarnation, int]) -> tuple[PrefixBatch, ...]:
        if not after:
            return ()

        async def command(redis: "redis.asyncio.Redis") -> list[Any]:
            async with redis.pipeline(transaction=False) as pipe:
                for incarnation, sequence in after.items():
                    pipe.xrange(self._stream(incarnation), min=f"{sequence + 1}-0", count=READ_LIMIT)
                return await pipe.execute()

        batches: list[PrefixBatch] = []
        for incarnation, entries in zip(after, await self._client.run(command), strict=True):
            for entry_id, fields in entries:
                try:
                    batches.append(load_batch(incarnation, int(entry_id.split(b"-")[0]), fields))
                except ValueError as error:
                    # Left out, so it shows as a gap and a snapshot heals it.
                    log.warning("prefix_batch_unreadable", incarnation=incarnation, error=str(error))
        return tuple(batches)


class RedisDesiredSizes:
    """Implements `base.DesiredSizes`."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def get(self) -> PoolSizes | None:
        prefill, decode = await self._client.run(
            lambda redis: redis.hmget(self._client.key("sizes"), ["prefill", "decode"])
        )
        if prefill is None or decode is None:
            return None
        return PoolSizes(int(prefill), int(decode))

    async def set(self, sizes: PoolSizes) -> None:
        fields: dict[Any, Any] = {"prefill": sizes.prefill, "decode": sizes.decode}
        await self._client.run(lambda redis: redis.hset(self._client.key("sizes"), mapping=fields))
