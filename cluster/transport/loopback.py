"""Pages within one process: the fake that tests, demos and the contract suite share with the real transports.

Receivers register under their incarnation; an unregistered one is a dead peer. The checks are those of the wire:
layout at `open`, checksum and lease at each push, all of it again at `commit`.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import Incarnation, PageId
from twostroke.cluster.core.layout import PageMemory, check_compatible
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import (
    CommitRequest,
    Intake,
    OnAccepted,
    PageWrite,
    TransferStats,
    WriteTicket,
    unheard,
)


class Receiver(NamedTuple):
    intake: Intake
    memory: PageMemory


class LoopbackTransport:
    """`receivers` is shared with the decode sides. `tamper` changes bytes after their checksum was taken (tests)."""

    name = "loopback"

    def __init__(
        self,
        memory: PageMemory,
        receivers: dict[Incarnation, Receiver],
        tamper: Callable[[bytearray], None] | None = None,
    ) -> None:
        self.memory = memory
        self.tamper = tamper
        self._receivers = receivers

    async def open(self, lease: Lease, on_accepted: OnAccepted = unheard) -> "LoopbackShipment":
        """See `Transport.open`."""
        check_compatible(self.memory.layout, lease.layout)
        check_compatible(self.memory.layout, self.receiver(lease).intake.layout)
        return LoopbackShipment(self, lease, on_accepted)

    async def close(self) -> None:
        """Nothing is held."""

    def receiver(self, lease: Lease) -> Receiver:
        """Raises TransferFailed when that life of the worker is over."""
        receiver = self._receivers.get(lease.incarnation)
        if receiver is None:
            raise TransferFailed(f"worker {lease.worker_id} ({lease.incarnation}) is gone")
        return receiver


class LoopbackShipment:
    """See `base.Shipment`."""

    def __init__(self, transport: LoopbackTransport, lease: Lease, on_accepted: OnAccepted) -> None:
        self._transport = transport
        self._lease = lease
        self._on_accepted = on_accepted
        self._over = False
        self._pages = 0
        self._bytes = 0
        self._busy_s = 0.0

    async def push(self, first: int, pages: Sequence[PageId]) -> None:
        """See `Shipment.push`."""
        self._check_live()
        started_s = time.monotonic()
        memory = self._transport.memory
        data = bytearray(memory.read(pages))
        size = memory.layout.page_bytes
        checksums = tuple(zlib.crc32(data[start : start + size]) for start in range(0, len(data), size))
        if self._transport.tamper is not None:
            self._transport.tamper(data)
        lease = self._lease
        try:
            receiver = self._transport.receiver(lease)
            write = PageWrite(lease.lease_id, lease.epoch, lease.nonce, first, len(pages))
            _land(receiver, receiver.intake.begin(write), data, checksums)
        except TransferFailed:
            self._over = True
            raise
        self._pages += len(pages)
        self._bytes += len(data)
        self._busy_s += time.monotonic() - started_s
        self._on_accepted()

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        """See `Shipment.commit`."""
        self._check_live()
        self._over = True
        lease = self._lease
        count = len(lease.shards[0].pages)
        commit = CommitRequest(
            lease.lease_id, lease.epoch, lease.nonce, count, first_token, first_token_index, first_logprob
        )
        self._transport.receiver(lease).intake.commit(commit)
        return TransferStats("loopback", self._pages, self._bytes, self._busy_s)

    async def abort(self, reason: str) -> None:
        """See `Shipment.abort`."""
        if self._over:
            return
        self._over = True
        lease = self._lease
        try:
            self._transport.receiver(lease).intake.abort(lease.lease_id, lease.epoch, lease.nonce, reason)
        except TransferFailed:
            return  # the other side is gone or has ended it already: nothing is left to tell

    def _check_live(self) -> None:
        if self._over:
            raise TransferFailed(f"lease {self._lease.lease_id}: the shipment is over")


def _land(receiver: Receiver, ticket: WriteTicket, data: bytearray, checksums: Sequence[int]) -> None:
    """Check each page's crc32, write the pages, end the ticket. Nothing is written unless all match."""
    verified = False
    try:
        view = memoryview(data)
        size = receiver.memory.layout.page_bytes
        for index, expected in enumerate(checksums):
            if zlib.crc32(view[index * size : (index + 1) * size]) != expected:
                raise TransferFailed(f"page {index} of the push arrived damaged")
        receiver.intake.land(ticket)
        receiver.memory.write(ticket.pages, view)
        verified = True
    finally:
        receiver.intake.end(ticket, verified)
