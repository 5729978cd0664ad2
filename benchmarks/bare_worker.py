"""What the benchmarks' workers have in common: they are `WorkerApp`s without an engine."""

from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.layout import gqa_layout
from twostroke.cluster.core.messages import WorkerCheck, WorkerInfo

LAYOUT = gqa_layout(model_fingerprint="none", layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=16)


class BareWorker:
    """The calls about the worker as a whole; `attach` and the session are the benchmark's own."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    async def snapshot(self) -> PrefixSnapshot:
        return PrefixSnapshot(self.info.incarnation, 0, ())

    async def check(self) -> WorkerCheck:
        raise Unavailable("there is no engine here")

    async def drain(self, timeout_s: float) -> bool:
        return True
