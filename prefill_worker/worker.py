"""A prefill worker: the host with the prefill scheduler, and shipping beside it."""

from collections.abc import Callable, Sequence

from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.messages import WorkerInfo
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.worker_host import WorkerHost
from twostroke.engine.commands import Event, PagesReady, PrefillDone, ShipmentDropped
from twostroke.engine.executor import Executor
from twostroke.engine.grammar import GrammarCompiler
from twostroke.prefill_worker.scheduler import PrefillLimits, PrefillScheduler
from twostroke.prefill_worker.shipping import Shipping


class PrefillWorker:
    """`host` is the worker app. `start` and `close` it on one event loop; `close` also closes the transports."""

    def __init__(
        self,
        info: WorkerInfo,
        executor: Executor,
        limits: PrefillLimits,
        transports: Sequence[Transport],
        publish: Callable[[PrefixBatch], None],
        metrics: WorkerMetrics,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        scheduler = PrefillScheduler(info, executor.vocab_size, limits)
        self.host = WorkerHost(info, scheduler, executor, self, publish, metrics, grammars)
        self.shipping = Shipping(transports, self.host.post, metrics)
        self._transports = tuple(transports)

    def start(self) -> None:
        self.host.start()

    async def close(self) -> None:
        await self.shipping.close()
        for transport in self._transports:
            await transport.close()
        await self.host.stop()

    def on_engine(self, event: Event) -> None:
        """Nothing here has to happen before the routers hear of it."""

    @property
    def num_transfers(self) -> int:
        return self.shipping.num_open

    def on_loop(self, event: Event) -> None:
        if isinstance(event, PagesReady | PrefillDone | ShipmentDropped):
            self.shipping.on_event(event)
