"""The attached workers: their links, their last load, and what this router has just given them.

Life of a worker here: `add` when a link is up; `on_load` with each report; jobs are charged when they are submitted
(so that a burst sees itself) and uncharged when they end; `remove` at its loss. Load is the larger of what the worker
reports and what this router knows it gave, since a report lags and other routers are only in the report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.cluster.core.ids import Incarnation, JobId, PrefixKey
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import LoadReport, Role, WorkerInfo
from twostroke.cluster.core.prefix import max_hit_pages, page_keys, root_key
from twostroke.router.index import PrefixIndex
from twostroke.router.policy import WorkerView

STALLED_S = 10.0
"""Jobs run and no step ended for this long: frozen, handled as lost."""


@dataclass(slots=True)
class Worker:
    link: WorkerLink
    load: LoadReport | None = None
    draining: bool = False
    full_from_tokens: int | None = None
    charges: dict[JobId, int] = field(default_factory=dict)
    """Tokens of work (prefill) or of KV (decode) of each job that this router has there."""
    charged_tokens: int = 0
    """Sum of `charges`, kept because every placement asks for it."""
    info: WorkerInfo = field(init=False)

    def __post_init__(self) -> None:
        self.info = self.link.info

    @property
    def stalled(self) -> bool:
        return self.load is not None and self.load.running > 0 and self.load.step_age_s > STALLED_S


class PromptKeys:
    """The prefix keys of one token sequence, hashed once for each kind of worker that is asked about."""

    def __init__(self, tokens: Sequence[int], salt: str, adapter: str) -> None:
        self._tokens = tokens
        self._salt = salt
        self._adapter = adapter
        self._keys: dict[tuple[str, int], list[PrefixKey]] = {}

    def of(self, info: WorkerInfo) -> list[PrefixKey]:
        """Keys of the leading pages that a hit on this worker may cover."""
        fingerprint, page_size = info.layout.model_fingerprint, info.layout.page_size
        keys = self._keys.get((fingerprint, page_size))
        if keys is None:
            num_pages = max_hit_pages(len(self._tokens), page_size)
            keys = []
            if num_pages:
                root = root_key(fingerprint, page_size, self._adapter, self._salt)
                keys = page_keys(root, self._tokens, page_size)[:num_pages]
            self._keys[fingerprint, page_size] = keys
        return keys


class Fleet:
    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._workers: dict[Incarnation, Worker] = {}

    def add(self, link: WorkerLink) -> None:
        self._workers[link.info.incarnation] = Worker(link)
        self.index.add(link.info.incarnation, link.info.num_pages)

    def remove(self, incarnation: Incarnation) -> Worker | None:
        self.index.remove(incarnation)
        return self._workers.pop(incarnation, None)

    def find(self, incarnation: Incarnation) -> Worker | None:
        return self._workers.get(incarnation)

    def of_link(self, link: WorkerLink) -> Worker | None:
        """The worker behind exactly this link; None for one that was lost or replaced."""
        worker = self._workers.get(link.info.incarnation)
        return worker if worker is not None and worker.link is link else None

    def workers(self, role: Role | None = None) -> list[Worker]:
        return [worker for worker in self._workers.values() if role is None or worker.info.role is role]

    def on_load(self, worker: Worker, report: LoadReport, now: float) -> None:
        worker.load = report
        worker.draining = report.draining
        worker.full_from_tokens = None
        self.index.observe(worker.info.incarnation, report.event_sequence, now)

    def mark_full(self, worker: Worker, num_tokens: int) -> None:
        """It refused a request of this size; smaller ones may try until its next load report."""
        known = worker.full_from_tokens
        worker.full_from_tokens = num_tokens if known is None else min(known, num_tokens)

    def views(self, role: Role, keys: PromptKeys, now: float) -> list[WorkerView]:
        return [self._view(worker, keys, now) for worker in self.workers(role)]

    def _view(self, worker: Worker, keys: PromptKeys, now: float) -> WorkerView:
        info, load = worker.info, worker.load
        charged = worker.charged_tokens
        queued = kv = 0
        if info.role is Role.PREFILL:
            queued = charged if load is None else max(load.queued_tokens, charged)
        else:
            reported = 0 if load is None else (load.ledger.active + load.ledger.leased) * info.layout.page_size
            kv = max(reported, charged)
        return WorkerView(
            info=info,
            queued_tokens=queued,
            kv_tokens=kv,
            running=max(len(worker.charges), 0 if load is None else load.running),
            cached_tokens=self.index.match(info.incarnation, keys.of(info), now) * info.layout.page_size,
            available=not worker.draining and not worker.stalled,
            full_from_tokens=worker.full_from_tokens,
        )

    def charge(self, link: WorkerLink, job: JobId, tokens: int) -> None:
        worker = self.of_link(link)
        if worker is not None:
            worker.charged_tokens += tokens - worker.charges.get(job, 0)
            worker.charges[job] = tokens

    def uncharge(self, link: WorkerLink, job: JobId) -> None:
        """Idempotent."""
        worker = self.of_link(link)
        if worker is not None:
            worker.charged_tokens -= worker.charges.pop(job, 0)
