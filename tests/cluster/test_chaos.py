"""Everything at once: mixed requests while workers die and come, transfers fail, clients leave. Seeded."""

import asyncio
from random import Random

import pytest

from tests.cluster_harness import Shape
from tests.routed_cluster import Gate, RoutedCluster, read, routed_cluster
from twostroke.cluster.core.errors import Cancelled, DeadlineExceeded, PeerLost, TransferFailed
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.messages import Role
from twostroke.cluster.core.random import choice_seed

NUM_REQUESTS = 60


async def one(routed: RoutedCluster, random: Random, ended: dict[str, int]) -> None:
    """One random request: golden, or a clear error."""
    shared = tuple(range(500, 500 + random.choice([0, 0, 9, 30])))
    prompt = shared + tuple(random.randrange(1000) for _ in range(random.randint(1, 40)))
    num_choices, length = random.choice([1, 1, 1, 3]), random.randint(1, 25)
    sampling = {"temperature": random.choice([0.0, 1.0]), "seed": random.randrange(1 << 30)}
    left = random.choice([15.0, 15.0, 15.0, 0.02])
    request = routed.request(prompt, length, num_choices=num_choices, time_left_s=left, **sampling)
    stream = routed.dispatcher.submit(request)
    if random.random() < 0.2:
        asyncio.get_running_loop().call_later(random.random() * 0.1, routed.dispatcher.cancel, request.request_id)
    try:
        answer = await read(stream)
    except (Cancelled, DeadlineExceeded, PeerLost, TransferFailed) as error:
        ended[error.code] = ended.get(error.code, 0) + 1
        return
    ended["finished"] = ended.get("finished", 0) + 1
    for number in range(num_choices):
        own = sampling | {"seed": choice_seed(int(sampling["seed"]), number)}
        assert answer.tokens[number] == routed.golden(prompt, length, **own)


async def trouble(routed: RoutedCluster, random: Random, gate: Gate) -> None:
    """Two workers of each role are lost and replaced, one after the other; some transfers fail."""
    for role in (Role.DECODE, Role.PREFILL) * 2:
        gate.open(TransferFailed("a fault"))
        done: set[RequestId] = set(routed.dispatcher.phases())
        async with asyncio.timeout(10):
            while done and len(done & set(routed.dispatcher.phases())) > len(done) * 0.8:  # noqa: ASYNC110
                await asyncio.sleep(0)
        nodes = routed.cluster.prefill if role is Role.PREFILL else routed.cluster.decode
        await routed.attach(await routed.cluster.add(role))
        await routed.cluster.lose(random.choice([node for node in nodes if not node.lost]), "killed")


@pytest.mark.parametrize("seed", range(4))
async def test_every_request_ends_golden_or_with_a_clear_error_and_nothing_leaks(seed: int) -> None:
    random, gate, ended = Random(seed), Gate(is_open=True), dict[str, int]()
    shape = Shape(prefill=2, decode=2, num_pages=96, step_delay_s=0.001)
    async with routed_cluster(shape, gate=gate, policy={"local_threshold_tokens": 6}) as routed:
        requests = [asyncio.create_task(one(routed, Random(seed * 1000 + n), ended)) for n in range(NUM_REQUESTS)]
        await trouble(routed, random, gate)
        await asyncio.gather(*requests)
        assert sum(ended.values()) == NUM_REQUESTS
        assert routed.metric("continuations_total") > 0
        assert ended["finished"] > NUM_REQUESTS / 2, ended
