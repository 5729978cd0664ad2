"""A router that finds its workers in the registry and keeps its index equal to theirs, with and without the store."""

from collections.abc import Mapping

from tests.cluster_harness import Node, Shape
from tests.routed_cluster import Gate, RoutedCluster, routed_cluster
from tests.waiting import until
from twostroke.cluster.core.clock import SystemClock
from twostroke.cluster.core.errors import Overloaded, TransferFailed, Unavailable
from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, new_incarnation
from twostroke.cluster.core.link import LinkListener, WorkerLink
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.state.memory import MemoryEventLog, MemoryRegistry
from twostroke.router.discovery import Discovery, Prove
from twostroke.router.self_test import ship_once

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

    def __init__(self, routed: RoutedCluster, prove: Prove | None = None) -> None:
        self._routed = routed
        self.registry = LosableRegistry(SystemClock(), 60.0)
        self.log = LosableLog(1000)
        self.discovery = Discovery(
            self.registry, self.log, routed.dispatcher, self._connect, prove or self._prove, self._snapshot
        )

    def _node(self, info: WorkerInfo) -> Node:
        return next(node for node in self._routed.cluster.nodes if node.info.incarnation == info.incarnation)

    async def _connect(self, info: WorkerInfo) -> WorkerLink:
        return await self._routed.cluster.connect(self._node(info), self._routed.router, self._routed.dispatcher)

    async def _connect_apart(self, info: WorkerInfo, listener: LinkListener) -> WorkerLink:
        return await self._routed.cluster.connect(self._node(info), new_incarnation(), listener)

    async def _prove(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        await ship_once(prefill, decode, self._connect_apart, 5.0)

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


async def test_a_prefill_worker_that_cannot_ship_is_attached_once_it_can() -> None:
    gate = Gate()
    gate.open(TransferFailed("the data port is shut"))  # for one commit
    async with routed_cluster(Shape(prefill=0, decode=0), gate=gate) as routed:
        finder = Finder(routed)
        finder.discovery.start()
        await finder.registry.register((await routed.cluster.add(Role.PREFILL)).info)
        await finder.registry.register((await routed.cluster.add(Role.DECODE)).info)
        await until(lambda: gate.error is None)
        assert [worker.info.role for worker in routed.dispatcher.fleet.workers()] == [Role.DECODE]
        assert routed.dispatcher.ready  # the decode worker prefills by itself
        assert (await routed.ask(PROMPT)).tokens[0] == routed.golden(PROMPT)
        await until(lambda: len(routed.dispatcher.fleet.workers()) == 2)
        assert routed.metric("requests_accepted_total") == 1  # users' alone count
        await finder.discovery.close()


async def test_without_local_prefill_ready_means_that_a_page_was_shipped() -> None:
    gate = Gate()
    async with routed_cluster(Shape(prefill=0), gate=gate, policy={"local_when_no_prefill": False}) as routed:
        finder = Finder(routed)
        finder.discovery.start()
        prefill = await routed.cluster.add(Role.PREFILL)
        await finder.registry.register(prefill.info)
        await until(lambda: prefill.host.load().generated_tokens == 1)  # the self-test waits for its commit
        assert not routed.dispatcher.ready
        gate.open()
        await until(lambda: routed.dispatcher.ready)
        await finder.discovery.close()


async def test_a_busy_decode_worker_holds_no_prefill_worker_back() -> None:
    async def prove(prefill: WorkerInfo, decode: WorkerInfo) -> None:
        raise Overloaded("no pages")

    async with routed_cluster(Shape(prefill=0)) as routed:
        finder = Finder(routed, prove)
        finder.discovery.start()
        await finder.registry.register((await routed.cluster.add(Role.PREFILL)).info)
        await until(lambda: len(routed.dispatcher.fleet.workers(Role.PREFILL)) == 1)
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
