"""A cluster of workers in one process: real engines, schedulers, lease books, shipping; no router.

    async with fake_cluster(Shape(prefill=1, decode=2)) as cluster:
        link = await cluster.connect(cluster.decode[0], router, listener)     # a WorkerLink
        ...
        await cluster.lose(cluster.prefill[0], "killed")                      # as a router sees a dead worker

Executors are fakes without torch unless `make_executor` gives others.
`links` is how routers attach: `direct` (core.link.DirectLink) or `grpc` (the attached stream on 127.0.0.1).
Leaving the context waits for rest, closes everything and proves that nothing leaked: page ledgers, scheduler
integrity, lease books, shipments, tasks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import grpc.aio
from prometheus_client import CollectorRegistry

from tests.waiting import until
from twostroke.cluster.attach import AttachedLink, AttachServicer, connect
from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation, WorkerId, new_incarnation
from twostroke.cluster.core.link import DirectLink, LinkListener, WorkerLink
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.stream import Timing
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.transport.loopback import LoopbackTransport, Receiver
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.cluster.worker_host import WorkerHost
from twostroke.decode_worker.scheduler import DecodeLimits
from twostroke.decode_worker.worker import DecodeWorker
from twostroke.engine.executor import Executor
from twostroke.engine.fake_executor import FakeExecutor
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.vocabulary import Vocabulary
from twostroke.prefill_worker.scheduler import PrefillLimits
from twostroke.prefill_worker.worker import PrefillWorker
from twostroke.proto.v1.kv_transfer_pb2_grpc import add_KvCollectiveServicer_to_server
from twostroke.proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server

FAST = Timing(beat_s=0.1, silence_s=1.0, hello_s=5.0)


@dataclass(frozen=True)
class Shape:
    """What the cluster is made of. `step_delay_s` slows every step down, so that a test can act in between."""

    prefill: int = 1
    decode: int = 1
    links: Literal["direct", "grpc"] = "direct"
    """`grpc` also ships pages over gRPC, else within the process."""
    collective: bool = False
    """Ship pages over torch.distributed; with `grpc` links."""
    page_size: int = 4
    num_pages: int = 128
    decode_pages: int = 0
    """0: as `num_pages`."""
    vocab_size: int = 1000
    max_positions: int = 4096
    prefill_chunk: int = 16
    decode_chunk: int = 32
    step_delay_s: float = 0.0
    message_bytes: int = 4096
    """Of a part of a push or of an offer: small, so that there are many."""
    timing: Timing = FAST
    hold_s: float = 10.0
    lease_ttl_s: float = 10.0
    max_running: int = 64
    max_waiting: int = 64

    @property
    def prefill_limits(self) -> PrefillLimits:
        return PrefillLimits(max_waiting=self.max_waiting, hold_s=self.hold_s)

    @property
    def decode_limits(self) -> DecodeLimits:
        return DecodeLimits(self.max_running, self.max_waiting, self.lease_ttl_s)


@dataclass
class Node:
    """One worker of the harness."""

    info: WorkerInfo
    executor: Executor
    worker: PrefillWorker | DecodeWorker
    registry: CollectorRegistry
    batches: list[PrefixBatch] = field(default_factory=list)
    links: list[WorkerLink] = field(default_factory=list)
    server: grpc.aio.Server | None = None
    servicer: AttachServicer | None = None
    close_streams: Callable[[], Awaitable[None]] | None = None
    lost: bool = False

    @property
    def host(self) -> WorkerHost:
        return self.worker.host

    @property
    def at_rest(self) -> bool:
        load = self.host.load()
        return load.ledger.at_rest and load.running == load.waiting == load.leases == 0


WrapTransport = Callable[[Transport], Transport]
MakeExecutor = Callable[[int], Executor]
"""From a number of pages."""


class FakeCluster:
    """Made by `fake_cluster`."""

    def __init__(
        self, shape: Shape, wrap: WrapTransport, make_executor: MakeExecutor | None, vocabulary: Vocabulary | None
    ) -> None:
        self.shape = shape
        self._vocabulary = vocabulary
        self._make_executor = make_executor or self._make_fake
        self.prefill: list[Node] = []
        self.decode: list[Node] = []
        self._wrap = wrap
        self._receivers: dict[Incarnation, Receiver] = {}

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]

    async def add(self, role: Role) -> Node:
        """Start one more worker and list it."""
        shape = self.shape
        siblings = self.prefill if role is Role.PREFILL else self.decode
        num_pages = shape.decode_pages if role is Role.DECODE and shape.decode_pages else shape.num_pages
        executor = self._make_executor(num_pages)
        server = new_server() if shape.links == "grpc" else None
        info = WorkerInfo(
            worker_id=WorkerId(f"{role.value}-{len(siblings)}"),
            incarnation=new_incarnation(),
            role=role,
            address=f"127.0.0.1:{bind(server, '127.0.0.1', 0)}" if server else "",
            model="fake",
            layout=executor.memory.layout,
            num_pages=num_pages,
            max_context=min(executor.max_positions, num_pages * shape.page_size),
            chunk_tokens=shape.prefill_chunk if role is Role.PREFILL else shape.decode_chunk,
            transports=("collective",) if shape.collective else ("grpc",) if server else ("loopback",),
        )
        batches: list[PrefixBatch] = []
        registry = CollectorRegistry()
        metrics = WorkerMetrics(registry, info.model, info.worker_id)
        grammars = None if self._vocabulary is None else GrammarCompiler(self._given_vocabulary)
        worker: PrefillWorker | DecodeWorker
        if role is Role.PREFILL:
            inner: Transport = LoopbackTransport(executor.memory, self._receivers)
            if shape.collective:
                from twostroke.cluster.transport.collective import CollectiveTransport

                inner = CollectiveTransport(
                    executor.memory, info.incarnation, host="127.0.0.1", offer_bytes=shape.message_bytes
                )
            elif server is not None:
                inner = GrpcTransport(executor.memory, info.incarnation, message_bytes=shape.message_bytes)
            worker = PrefillWorker(
                info, executor, shape.prefill_limits, [self._wrap(inner)], batches.append, metrics, grammars
            )
        else:
            worker = DecodeWorker(info, executor, shape.decode_limits, batches.append, metrics, grammars)
            self._receivers[info.incarnation] = Receiver(worker.book, executor.memory)
            if server is not None:
                add_transfer_services(server, worker.book, executor.memory, info.incarnation)
        node = Node(info, executor, worker, registry, batches, server=server)
        if shape.collective and isinstance(worker, DecodeWorker):
            from twostroke.cluster.transport.collective_server import CollectiveServicer

            assert server is not None
            collective = CollectiveServicer(worker.book, executor.memory, info.incarnation, host="127.0.0.1")
            add_KvCollectiveServicer_to_server(collective, server)  # type: ignore[no-untyped-call]
            node.close_streams = collective.close
        worker.start()
        if server is not None:
            node.servicer = AttachServicer(worker.host, shape.timing)
            add_WorkerServicer_to_server(node.servicer, server)  # type: ignore[no-untyped-call]
            await server.start()
        siblings.append(node)
        return node

    def _given_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None
        return self._vocabulary

    def _make_fake(self, num_pages: int) -> Executor:
        shape = self.shape
        return FakeExecutor(num_pages, shape.page_size, shape.vocab_size, shape.max_positions, shape.step_delay_s)

    async def connect(self, node: Node, router: Incarnation, listener: LinkListener) -> WorkerLink:
        if node.server is None:
            loop = asyncio.get_running_loop()
            link: WorkerLink = DirectLink(node.host, router, listener, loop.call_soon)
        else:
            link = await connect(node.info.address, router, listener, timing=self.shape.timing)
        node.links.append(link)
        return link

    async def lose(self, node: Node, reason: str) -> None:
        """The worker is gone at once for everybody: links break, nothing is finished, nothing is checked later."""
        node.lost = True
        self._receivers.pop(node.info.incarnation, None)
        for link in node.links:
            if isinstance(link, DirectLink):
                link.cut(reason)
        await self._close(node)

    async def rest(self, timeout_s: float = 10.0) -> None:
        """Until no live worker has work, leases or pages in use. Raises TimeoutError."""
        live = [node for node in self.nodes if not node.lost]
        try:
            await until(lambda: all(node.at_rest for node in live), timeout_s)
        except TimeoutError:
            loads = {node.info.worker_id: node.host.load() for node in live}
            raise AssertionError(f"not at rest after {timeout_s} s: {loads}") from None

    async def close(self) -> None:
        """Close all links and workers, then the no-leak check."""
        for node in self.nodes:
            for link in node.links:
                link.close("the test is over")
        await self.rest()
        for node in self.nodes:
            if not node.lost:
                await self._close(node)
        for node in self.nodes:
            await asyncio.gather(*(link.wait_closed() for link in node.links if isinstance(link, AttachedLink)))
            if not node.lost:
                check_nothing_leaked(node)
        names = ("attach.", "link.", "host.", "shipping.", "collective.", "grpc_transport.")
        await until(lambda: not any(task.get_name().startswith(names) for task in asyncio.all_tasks()))

    async def _close(self, node: Node) -> None:
        if node.servicer is not None and node.server is not None:
            await node.servicer.close("the worker ends")
            if node.close_streams is not None:
                await node.close_streams()
            await node.server.stop(0)
        await node.worker.close()


def check_nothing_leaked(node: Node) -> None:
    """For a worker at rest whose engine has stopped."""
    host = node.host
    assert host.engine.failed is None, host.engine.failed
    host.scheduler.check_integrity()
    assert host.scheduler.idle
    load = host.load()
    assert load.ledger.at_rest, load
    assert load.ledger.total == node.info.num_pages
    assert host.num_attached == 0
    if isinstance(node.executor, FakeExecutor):
        assert node.executor.num_bad_reads == 0, "a context was read whose slots did not hold its positions"
    if isinstance(node.worker, DecodeWorker):
        assert node.worker.book.num_open == node.worker.book.num_writes == 0
    else:
        assert node.worker.shipping.num_open == 0


@asynccontextmanager
async def fake_cluster(
    shape: Shape = Shape(),
    wrap: WrapTransport = lambda transport: transport,
    make_executor: MakeExecutor | None = None,
    vocabulary: Vocabulary | None = None,
) -> AsyncIterator[FakeCluster]:
    """With a `vocabulary` workers take grammars. `wrap` may put a faulty or slow transport around each prefill worker's
    own. A failed test is not checked.
    """
    cluster = FakeCluster(shape, wrap, make_executor, vocabulary)
    for _ in range(shape.prefill):
        await cluster.add(Role.PREFILL)
    for _ in range(shape.decode):
        await cluster.add(Role.DECODE)
    yield cluster
    await cluster.close()
