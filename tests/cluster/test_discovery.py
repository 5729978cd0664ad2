"""A router that finds its workers in the registry and keeps its index equal to theirs, with and without the store."""

from collections.abc import Mapping

from tests.cluster_harness import Node, Shape
from tests.routed_cluster import RoutedCluster, routed_cluster
from tests.waiting import until
from twostroke.cluster.core.clock import SystemClock
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.state.memory import MemoryEventLog, MemoryRegistry
from twostroke.router.discovery import Discovery

PROMPT = tuple(range(50, 90))


class LosableRegistry(MemoryRegistry):
    """The memory registry, until `lost`."""

    lost = False

    async def workers(self) -> tuple[WorkerInfo, ...]:
        if self.lost:
            raise Unavailable("the store is gone")
        return await super().workers()


class LosableLog(MemoryEventLog):
    lost = False

    async def read(self, after: Mapping[Incarnation, int]) -> tuple[PrefixBatch, ...]:
        if self.lost:
            raise Unavailable("the store is gone")
        return await super().read(after)


class Finder:
    """A Discovery over the harness's nodes."""

    def __init__(self, routed: RoutedCluster) -> None:
        self._routed = routed
        self.registry = LosableRegistry(SystemClock(), 60.0)
        self.log = LosableLog(1000)
        self.discovery = Discovery(self.registry, self.log, routed.dispatcher, self._connect, self._snapshot)

    def _node(self, info: WorkerInfo) -> Node:
        return next(node for node in self._routed.cluster.nodes if node.info.incarnation == info.incarnation)

    async def _connect(self, info: WorkerInfo) -> WorkerLink:
        return await self._routed.cluster.connect(self._node(info), self._routed.router, self._routed.dispatcher)

    async def _snapshot(self, info: WorkerInfo) -> PrefixSnapshot:
        return await self._node(info).host.snapshot()

    async def publish(self) -> None:
        for node in self._routed.cluster.nodes:
            for batch in list(node.batches):
                await self.log.publish(batch)

    async def in_step(self) -> None:
        """Until every worker's set in the index is the worker's own."""
        index = self._routed.dispatcher.index
        for node in self._routed.cluster.nodes:
            if not node.lost:
                truth = frozenset((await node.host.snapshot()).keys)
                assert truth
                await until(lambda node=node, truth=truth: index.known(node.info.incarnation) == truth, 8.0)  # type: ignore[misc]


async def test_registered_workers_are_attached_and_followed() -> None:
    async with routed_cluster(Shape(prefill=0, decode=0)) as routed:
        finder = Finder(routed)
        finder.discovery.start()
        for role in (Role.PREFILL, Role.DECODE):
            await finder.registry.register((await routed.cluster.add(role)).info)
        await until(lambda: len(routed.dispatcher.fleet.workers()) == 2)
        assert (await routed.ask(PROMPT)).tokens[0] == routed.golden(PROMPT)
        await finder.publish()
        await finder.in_step()
        assert routed.dispatcher.index.num_snapshots == 0
        await finder.discovery.close()


async def test_losing_the_store_harms_no_request_and_snapshots_keep_the_index_in_step() -> None:
    async with routed_cluster() as routed:
        finder = Finder(routed)
        finder.registry.lost = finder.log.lost = True
        finder.discovery.start()
        assert (await routed.ask(PROMPT)).tokens[0] == routed.golden(PROMPT)
        await finder.in_step()
        assert len(routed.dispatcher.fleet.workers()) == 2
        finder.registry.lost = finder.log.lost = False
        node = await routed.cluster.add(Role.DECODE)
        await finder.registry.register(node.info)
        await until(lambda: len(routed.dispatcher.fleet.workers()) == 3)
        await finder.discovery.close()


async def test_a_restarted_worker_is_another_worker() -> None:
    async with routed_cluster(Shape(decode=2)) as routed:
        finder = Finder(routed)
        for node in routed.cluster.nodes:
            await finder.registry.register(node.info)
        finder.discovery.start()
        old = routed.cluster.decode[0]
        await finder.registry.deregister(old.info.incarnation)
        await routed.cluster.lose(old, "killed")
        new = await routed.cluster.add(Role.DECODE)
        await finder.registry.register(new.info)
        await until(lambda: routed.dispatcher.fleet.find(new.info.incarnation) is not None)
        assert routed.dispatcher.fleet.find(old.info.incarnation) is None
        assert routed.dispatcher.index.known(old.info.incarnation) == frozenset()
        await finder.discovery.close()
