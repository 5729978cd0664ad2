"""One contract for both memories of the cluster: the in-process fake and a real Valkey server."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.redis_server import RedisServer, redis_server
from tests.router_builders import worker_info
from twostroke.cluster.core.clock import SystemClock
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation, PrefixKey
from twostroke.cluster.state.base import DesiredSizes, EventLog, PoolSizes, Registry
from twostroke.cluster.state.memory import MemoryDesiredSizes, MemoryEventLog, MemoryRegistry
from twostroke.cluster.state.redis import RedisClient, RedisDesiredSizes, RedisEventLog, RedisRegistry

TTL_S = 0.3
MAXLEN = 1000


@dataclass
class State:
    registry: Registry
    events: EventLog
    sizes: DesiredSizes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def state(request: pytest.FixtureRequest) -> AsyncIterator[State]:
    if request.param == "memory":
        yield State(MemoryRegistry(SystemClock(), TTL_S), MemoryEventLog(MAXLEN), MemoryDesiredSizes())
        return
    server: RedisServer = request.getfixturevalue("server")
    client = RedisClient(server.url, f"test:{{{uuid.uuid4().hex}}}")
    yield State(RedisRegistry(client, TTL_S), RedisEventLog(client, MAXLEN), RedisDesiredSizes(client))
    await client.close()


def key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(16, "little"))


async def test_registered_workers_are_listed_with_all_they_told(state: State) -> None:
    first, second = worker_info("prefill-0"), worker_info("decode-0")
    await state.registry.register(first)
    await state.registry.register(second)
    assert await state.registry.workers() == (second, first)


async def test_registering_again_replaces(state: State) -> None:
    info = worker_info("prefill-0")
    await state.registry.register(info)
    await state.registry.register(info)
    assert await state.registry.workers() == (info,)


async def test_a_restarted_worker_is_another_entry(state: State) -> None:
    old, new = worker_info("decode-0", incarnation="one"), worker_info("decode-0", incarnation="two")
    await state.registry.register(old)
    await state.registry.register(new)
    assert set(await state.registry.workers()) == {old, new}
    await state.registry.deregister(old.incarnation)
    await state.registry.deregister(old.incarnation)
    assert await state.registry.workers() == (new,)


async def test_an_entry_expires_unless_renewed(state: State) -> None:
    kept, forgotten = worker_info("decode-0"), worker_info("decode-1")
    await state.registry.register(kept)
    await state.registry.register(forgotten)
    async with asyncio.timeout(10):
        while await state.registry.workers() != (kept,):
            await state.registry.renew(kept)


async def test_renewing_enters_what_the_store_has_forgotten(state: State) -> None:
    info = worker_info("decode-0")
    await state.registry.renew(info)
    assert await state.registry.workers() == (info,)


async def test_batches_are_read_in_order_after_a_sequence(state: State) -> None:
    worker = Incarnation("w")
    batches = [
        PrefixBatch(worker, 1, stored=(key(1), key(2))),
        PrefixBatch(worker, 2, removed=(key(1),)),
        PrefixBatch(worker, 3, cleared=True),
    ]
    for batch in batches:
        await state.events.publish(batch)
    assert await state.events.read({worker: 0}) == tuple(batches)
    assert await state.events.read({worker: 2}) == (batches[2],)
    assert await state.events.read({worker: 3}) == ()


async def test_a_repeated_batch_is_kept_once(state: State) -> None:
    worker = Incarnation("w")
    first, second = PrefixBatch(worker, 1, stored=(key(1),)), PrefixBatch(worker, 2, stored=(key(2),))
    for batch in (first, second, first, second):
        await state.events.publish(batch)
    assert await state.events.read({worker: 0}) == (first, second)


async def test_several_workers_are_read_at_once(state: State) -> None:
    one, two, absent = Incarnation("one"), Incarnation("two"), Incarnation("absent")
    await state.events.publish(PrefixBatch(one, 1, stored=(key(1),)))
    await state.events.publish(PrefixBatch(two, 5, stored=(key(2),)))
    found = await state.events.read({one: 0, two: 4, absent: 0})
    assert {batch.incarnation: batch.sequence for batch in found} == {one: 1, two: 5}
    assert await state.events.read({}) == ()


async def test_the_log_is_bounded(state: State) -> None:
    worker = Incarnation("w")
    for sequence in range(1, 3 * MAXLEN):
        await state.events.publish(PrefixBatch(worker, sequence))
    # Redis trims by whole nodes, so a little more than MAXLEN may remain.
    first = (await state.events.read({worker: 0}))[0]
    assert first.sequence > MAXLEN


async def test_desired_sizes_are_what_was_last_set(state: State) -> None:
    assert await state.sizes.get() is None
    await state.sizes.set(PoolSizes(prefill=2, decode=3))
    await state.sizes.set(PoolSizes(prefill=1, decode=0))
    assert await state.sizes.get() == PoolSizes(prefill=1, decode=0)


@pytest.mark.redis
async def test_a_dead_server_is_unavailable_within_seconds_and_comes_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = RedisClient(server.url, "test:{restart}")
        registry = RedisRegistry(client, ttl_s=10)
        info = worker_info("decode-0")
        await registry.register(info)
        server.stop()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(5):
                await registry.workers()
        server.start()
        await registry.renew(info)
        assert await registry.workers() == (info,)
        await client.close()


@pytest.mark.redis
async def test_a_demoted_primary_is_retried_within_bounds(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = RedisClient(server.url, "test:{readonly}")
        registry = RedisRegistry(client, ttl_s=10)
        await client.run(lambda redis: redis.execute_command("REPLICAOF", "127.0.0.1", "1"))
        with pytest.raises(Unavailable, match="ReadOnly"):
            await registry.register(worker_info("decode-0"))
        await client.run(lambda redis: redis.execute_command("REPLICAOF", "NO", "ONE"))
        await registry.register(worker_info("decode-0"))
        assert len(await registry.workers()) == 1
        await client.close()


@pytest.mark.redis
async def test_an_unreadable_entry_hides_no_other(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = RedisClient(server.url, "test:{bad}")
        registry = RedisRegistry(client, ttl_s=10)
        info = worker_info("decode-0")
        await registry.register(info)
        await client.run(lambda redis: redis.set(client.key("worker", "bad"), b'{"role": 1}'))
        await client.run(lambda redis: redis.sadd(client.key("workers"), "bad"))
        assert await registry.workers() == (info,)
        await client.close()
