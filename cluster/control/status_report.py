"""What `twostroke status` says of each process, as plain data; the table and `--json` are two views of it.

A process may take, idle, no more than its limit: a router ROUTER_LIMIT_BYTES, a worker its weights and page pool and
WORKER_EXTRA_BYTES (interpreter, torch, kernels, buffers). Pages that were never written take no memory yet.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from twostroke.cluster.control.child import ChildView
from twostroke.cluster.control.supervisor import MemberRole, MemberState
from twostroke.cluster.core.messages import LoadReport

ROUTER_LIMIT_BYTES = 400 * 10**6
WORKER_EXTRA_BYTES = 600 * 10**6

COLUMNS = (
    "role",
    "worker",
    "pid",
    "incarnation",
    "state",
    "restarts",
    "memory",
    "limit",
    "weights",
    "pool",
    "run/wait",
    "free/cached/active/leased/quar.",
    "last end",
)


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process. What is None is not known, or not of this role."""

    role: str
    worker_id: str
    pid: int
    """0: none runs."""
    state: str
    restarts: int
    rss_bytes: int
    """Of the process and its children."""
    limit_bytes: int | None
    weight_bytes: int | None
    pool_bytes: int | None
    ready: Mapping[str, Any]
    """What the process said when it was ready: addresses, incarnation, model."""
    load: LoadReport | None
    last_end: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        """In the order of COLUMNS."""
        ledger = self.load.ledger if self.load is not None else None
        return [
            self.role,
            self.worker_id,
            str(self.pid or "-"),
            str(self.ready.get("incarnation", "-")),
            self.state,
            str(self.restarts),
            _mebibytes(self.rss_bytes) + (" OVER" if self.limit_bytes and self.rss_bytes > self.limit_bytes else ""),
            _mebibytes(self.limit_bytes),
            _mebibytes(self.weight_bytes),
            _mebibytes(self.pool_bytes),
            f"{self.load.running}/{self.load.waiting}" if self.load is not None else "-",
            f"{ledger.free}/{ledger.cached}/{ledger.active}/{ledger.leased}/{ledger.quarantined}" if ledger else "-",
            self.last_end or "-",
        ]


def report_process(view: ChildView, load: LoadReport | None) -> ProcessReport:
    """From what its host says of it and, for a worker that answered, what it says itself."""
    weights, pool = view.ready.get("weight_bytes"), view.ready.get("pool_bytes")
    limit = ROUTER_LIMIT_BYTES if view.role == MemberRole.ROUTER.value else None
    if weights is not None and pool is not None:
        limit = weights + pool + WORKER_EXTRA_BYTES
    drains = view.state is MemberState.READY and load is not None and load.draining
    return ProcessReport(
        role=view.role,
        worker_id=view.worker_id,
        pid=view.pid,
        state=(MemberState.DRAINING if drains else view.state).value,
        restarts=view.restarts,
        rss_bytes=view.rss_bytes,
        limit_bytes=limit,
        weight_bytes=weights,
        pool_bytes=pool,
        ready=view.ready,
        load=load,
        last_end=view.last_end,
    )


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):.0f} MiB"
