"""Builders for everything that moves pages: a small layout, leases, a decode side that records its callbacks."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.clock import Clock
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, RequestId, WorkerId, new_lease_id
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.messages import Lease, LeaseShard
from twostroke.cluster.transport.base import CommitRequest, PageWrite
from twostroke.decode_worker.intake import LeaseBook
from twostroke.engine.commands import Committed, LeaseRenewed

DECODE = Incarnation("decode-life-1")
PREFILL = Incarnation("prefill-life-1")


def make_layout(page_bytes: int = 64, fingerprint: str = "fake") -> PageLayout:
    """A layout whose pages have exactly `page_bytes` (a multiple of 8) bytes."""
    return gqa_layout(
        model_fingerprint=fingerprint, layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=page_bytes // 8
    )


LAYOUT = make_layout()

B = TypeVar("B", bound=LeaseBook)


def make_lease(
    pages: list[int],
    *,
    layout: PageLayout = LAYOUT,
    address: str = "127.0.0.1:1",
    incarnation: Incarnation = DECODE,
    request: str = "request",
    lease_id: LeaseId | None = None,
    transports: tuple[str, ...] = ("collective", "grpc", "loopback"),
) -> Lease:
    return Lease(
        lease_id=lease_id or new_lease_id(),
        job=JobId(RequestId(request), 0, 0),
        epoch=0,
        nonce=b"0123456789abcdef",
        worker_id=WorkerId("decode-0"),
        incarnation=incarnation,
        layout=layout,
        transports=transports,
        device="cpu",
        num_held=0,
        shards=(LeaseShard(0, address, 0, 1, tuple(PageId(page) for page in pages)),),
        ttl_s=30.0,
    )


def renewed(lease: Lease) -> Lease:
    """As a decode worker renews it: another epoch and another nonce."""
    epoch = lease.epoch + 1
    return replace(lease, epoch=epoch, nonce=epoch.to_bytes(16, "big"))


def write_of(lease: Lease, first: int, count: int) -> PageWrite:
    return PageWrite(lease.lease_id, lease.epoch, lease.nonce, first, count)


def commit_of(lease: Lease, token: int = 7, num_pages: int | None = None) -> CommitRequest:
    count = len(lease.shards[0].pages) if num_pages is None else num_pages
    return CommitRequest(lease.lease_id, lease.epoch, lease.nonce, count, token, 0)


def random_pages(layout: PageLayout, num_pages: int, seed: int = 1) -> BytePages:
    """A pool in which every page differs."""
    memory = BytePages(layout, num_pages)
    memory.write(
        [PageId(page) for page in range(num_pages)], memoryview(random.Random(seed).randbytes(memory_size(memory)))
    )
    return memory


def memory_size(memory: BytePages) -> int:
    return memory.num_pages * memory.layout.page_bytes


@dataclass
class DecodeSide:
    """A lease book, its pool, and what it told the engine."""

    layout: PageLayout = LAYOUT
    num_pages: int = 64
    clock: Clock | None = None
    committed: list[Committed] = field(default_factory=list)
    touched: list[LeaseId] = field(default_factory=list)
    released: list[LeaseId] = field(default_factory=list)
    renewals: list[LeaseRenewed] = field(default_factory=list)
    on_release: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.memory = BytePages(self.layout, self.num_pages)
        self.lock = threading.Lock()
        self.book: LeaseBook = self.make_book(LeaseBook)

    def make_book(self, kind: type[B]) -> B:
        return kind(
            self.layout, self.committed.append, self.touched.append, self._release, self.renewals.append, self.clock
        )

    def _release(self, lease_id: LeaseId) -> None:
        self.released.append(lease_id)
        self.on_release()

    def assert_at_rest(self) -> None:
        """No lease is open and no write is under way."""
        assert self.book.num_writes == 0
        assert self.book.num_open == 0
