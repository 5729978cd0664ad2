"""A decode worker: the host with the decode scheduler, and the lease book that transports write through."""

from collections.abc import Callable

from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.cluster.worker_host import WorkerHost
from twostroke.decode_worker.intake import LeaseBook
from twostroke.decode_worker.scheduler import DecodeLimits, DecodeScheduler
from twostroke.engine.commands import Event, LeaseClosed, LeaseOpened, LeaseTouched, PagesReleased
from twostroke.engine.executor import Executor
from twostroke.engine.grammar import GrammarCompiler


class DecodeWorker:
    """`host` is the worker app, `book` what the receiving transports work on."""

    def __init__(
        self,
        info: WorkerInfo,
        executor: Executor,
        limits: DecodeLimits,
        publish: Callable[[PrefixBatch], None],
        metrics: WorkerMetrics,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        scheduler = DecodeScheduler(info, executor.vocab_size, limits)
        self.host = WorkerHost(info, scheduler, executor, self, publish, metrics, grammars)
        self.book = LeaseBook(
            info.layout,
            on_committed=self.host.post,
            on_touched=lambda lease_id: self.host.post(LeaseTouched(lease_id)),
            on_released=lambda lease_id: self.host.post(PagesReleased(lease_id)),
            on_renewed=self.host.post,
        )

    def start(self) -> None:
        self.host.start()

    async def close(self) -> None:
        await self.host.stop()

    def on_engine(self, event: Event) -> None:
        """The book knows a lease before a router, hence a writer, can."""
        if isinstance(event, LeaseOpened):
            self.book.open(event.lease)
        elif isinstance(event, LeaseClosed):
            self.book.close(event.lease_id, event.committed)

    @property
    def num_transfers(self) -> int:
        return self.book.num_open

    def on_loop(self, event: Event) -> None:
        """Nothing: the book heard of its events on the engine thread."""
