"""One contract, all transports: pages arrive whole, checked and under a live lease, or the sender hears why not."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

import grpc
import pytest
import torch

from tests.transfer_builders import DECODE, LAYOUT, PREFILL, DecodeSide, make_layout, make_lease, random_pages, renewed
from tests.waiting import on_this_machine, until
from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, LeaseId, PageId
from twostroke.cluster.core.layout import PageLayout
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import PageWrite, Transport, WriteTicket
from twostroke.cluster.transport.collective import CollectiveTransport
from twostroke.cluster.transport.collective_group import PREFILL_RANK, PairGroup, PairThread, checksums
from twostroke.cluster.transport.collective_server import CollectiveServicer
from twostroke.cluster.transport.control import writer_of
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.transport.loopback import LoopbackTransport, Receiver
from twostroke.cluster.transport.server import MAX_PUSHES, add_transfer_services
from twostroke.cluster.wire.channel import bind, new_server, open_channel
from twostroke.cluster.wire.convert import layout_to_wire
from twostroke.decode_worker.intake import LeaseBook
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1.kv_transfer_pb2_grpc import (
    KvCollectiveStub,
    KvTransferStub,
    add_KvCollectiveServicer_to_server,
)

Tamper = Callable[[bytearray], None]
OFFER_BYTES = 64 << 10


@dataclass
class Pair:
    """A sender and a decode side, joined by one kind of transport."""

    kind: str
    closers: list[Callable[[], object]] = field(default_factory=list)
    receivers: dict[Incarnation, Receiver] = field(default_factory=dict)
    address: str = "127.0.0.1:1"
    max_groups: int = 16

    async def serve(self, side: DecodeSide, incarnation: Incarnation = DECODE, port: int = 0) -> Callable[[], object]:
        """Start a life of the decode worker; returns what kills it."""
        if self.kind == "loopback":
            self.receivers[incarnation] = Receiver(side.book, side.memory)
            return lambda: self.receivers.pop(incarnation)
        server = new_server()
        add_transfer_services(server, side.book, side.memory, incarnation, timeout_s=2.0)
        servicer = CollectiveServicer(
            side.book, side.memory, incarnation, host="127.0.0.1", operation_timeout_s=2.0, max_groups=self.max_groups
        )
        add_KvCollectiveServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
        await server.start()

        async def stop() -> None:
            await servicer.close()
            await server.stop(None)

        self.closers.append(stop)
        return stop

    def sender(self, layout: PageLayout = LAYOUT, num_pages: int = 64, tamper: Tamper | None = None) -> Transport:
        memory = random_pages(layout, num_pages)
        transport: Transport
        if self.kind == "loopback":
            transport = LoopbackTransport(memory, self.receivers, tamper)
        elif self.kind == "grpc":
            transport = GrpcTransport(memory, PREFILL, message_bytes=64 << 10, operation_timeout_s=2.0)
        else:
            return self.collective(memory)
        self.closers.insert(0, transport.close)
        return transport

    def collective(
        self, memory: BytePages, sender: Incarnation = PREFILL, idle_group_s: float = 60.0, max_groups: int = 16
    ) -> CollectiveTransport:
        transport = CollectiveTransport(
            memory,
            sender,
            host="127.0.0.1",
            offer_bytes=OFFER_BYTES,
            operation_timeout_s=2.0,
            idle_group_s=idle_group_s,
            max_groups=max_groups,
        )
        self.closers.insert(0, transport.close)
        return transport

    def lease(self, side: DecodeSide, pages: list[int], incarnation: Incarnation = DECODE) -> Lease:
        lease = make_lease(pages, layout=side.layout, address=self.address, incarnation=incarnation)
        side.book.open(lease)
        return lease


async def run(closer: Callable[[], object]) -> None:
    result = closer()
    if asyncio.iscoroutine(result):
        await result


@pytest.fixture(params=["loopback", "grpc", "collective"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    threads = len(threads_of_ours())
    pair = Pair(request.param)
    yield pair
    for closer in pair.closers:
        await run(closer)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, leaked = await asyncio.wait(tasks, timeout=5)
        assert leaked == set()
    # The loop's own pool (`asyncio_*`) ends with the loop; grpc.aio keeps one poller a process.
    assert len(threads_of_ours()) <= threads + 1


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def assert_arrived(side: DecodeSide, lease: Lease, source: list[PageId]) -> None:
    """The sender's pool is the same in every test of one layout, so it can be made again."""
    expected = random_pages(side.layout, 64).read(source)
    assert side.memory.read(list(lease.shards[0].pages)) == expected


async def test_pages_arrive_in_any_order_and_the_commit_hands_over_once(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [9, 4, 7, 1])

    shipment = await pair.sender().open(lease)
    await shipment.push(2, ids(30, 31))
    await shipment.push(0, ids(20))
    await shipment.push(1, ids(21))
    await shipment.push(1, ids(21))  # a repeated chunk changes nothing
    stats = await shipment.commit(first_token=11, first_token_index=3)

    assert (stats.transport, stats.pages, stats.bytes) == (pair.kind, 5, 5 * LAYOUT.page_bytes)
    assert [(event.first_token, event.first_token_index) for event in side.committed] == [(11, 3)]
    assert_arrived(side, lease, ids(20, 21, 30, 31))
    side.book.close(lease.lease_id, committed=True)
    side.assert_at_rest()


async def test_zero_pages(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    shipment = await pair.sender().open(pair.lease(side, []))
    await shipment.push(0, [])
    await shipment.commit(1, 0)
    assert len(side.committed) == 1


@pytest.mark.parametrize("page_bytes", [1024, 64 << 10, 3 << 20])
async def test_more_than_any_message_holds(pair: Pair, page_bytes: int) -> None:
    layout = make_layout(page_bytes)
    side = DecodeSide(layout, num_pages=64 if page_bytes < 1 << 20 else 4)
    await pair.serve(side)
    count = min(side.num_pages, (6 << 20) // page_bytes)
    lease = pair.lease(side, list(reversed(range(count))))
    transport = pair.sender(layout, num_pages=count)
    heard: list[bool] = []

    shipment = await transport.open(lease, lambda: heard.append(True))
    await shipment.push(0, [PageId(page) for page in range(count)])
    # One offer holds as many whole pages as fit, or one page; the others send it all in one.
    assert len(heard) == (-(-count // max(1, OFFER_BYTES // page_bytes)) if pair.kind == "collective" else 1)
    await shipment.commit(1, 0)
    expected = random_pages(layout, count).read([PageId(page) for page in range(count)])
    assert side.memory.read(list(lease.shards[0].pages)) == expected


async def test_a_commit_with_missing_pages_is_refused(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    shipment = await pair.sender().open(pair.lease(side, [1, 2, 3]))
    await shipment.push(0, ids(1))
    await shipment.push(2, ids(3))
    with pytest.raises(TransferFailed, match="1 of 3 pages are not verified, first 1"):
        await shipment.commit(1, 0)
    assert side.committed == []
    await shipment.abort("after the end: nothing happens")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"nonce": b"x" * 16}, "wrong nonce"), ({"epoch": 5}, "epoch 5"), ({"lease_id": LeaseId("none")}, "unknown")],
)
async def test_wrong_credentials_write_nothing(pair: Pair, change: dict[str, object], message: str) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1])
    shipment = await pair.sender().open(replace(lease, **change))  # type: ignore[arg-type]
    with pytest.raises(TransferFailed, match=message):
        await ship(shipment, 1)
    assert side.memory.read(ids(1)) == bytes(LAYOUT.page_bytes)
    assert side.book.num_writes == 0


async def ship(shipment: object, count: int) -> None:
    """All pages and the commit: where a refusal shows depends on the transport, that it shows does not."""
    await shipment.push(0, [PageId(page) for page in range(count)])  # type: ignore[attr-defined]
    await shipment.commit(1, 0)  # type: ignore[attr-defined]


async def test_a_range_outside_the_lease_is_refused(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    shipment = await pair.sender().open(pair.lease(side, [1]))
    with pytest.raises(TransferFailed, match="outside"):
        await ship(shipment, 2)


async def test_another_layout_is_refused_by_name(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1])
    other = make_layout(fingerprint="another model")
    with pytest.raises(LayoutMismatch, match="model_fingerprint"):
        await pair.sender(other).open(lease)
    # A lease that lies about the layout does not get past the receiver's own.
    with pytest.raises(LayoutMismatch, match="model_fingerprint"):
        await pair.sender(other).open(replace(lease, layout=other))


async def test_a_flipped_bit_is_refused_and_nothing_is_written(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    size = LAYOUT.page_bytes

    def flip(data: bytearray) -> None:
        data[size + 3] ^= 0x10

    if pair.kind == "loopback":
        shipment = await pair.sender(tamper=flip).open(lease)
        with pytest.raises(TransferFailed, match="page 1 of the push arrived damaged"):
            await ship(shipment, 2)
    elif pair.kind == "collective":
        assert await offer_raw(pair.address, lease, wrong_sum_of=1) == "page 1 of the push arrived damaged"
    else:
        data = bytearray(range(2 * size))
        sums = [crc32(data[:size]), crc32(data[size:])]
        flip(data)
        code, details = await push_raw(pair.address, lease, sums, [bytes(data)])
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "page 1 of the push arrived damaged")
    assert side.memory.read(ids(1, 2)) == bytes(2 * size)
    assert side.committed == []
    assert side.book.num_writes == 0


async def push_raw(address: str, lease: Lease, sums: list[int], parts: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """One Push as no sender of ours makes it; its status."""
    writer = pb.Writer(lease_id=lease.lease_id, epoch=lease.epoch, nonce=lease.nonce)
    messages = [pb.PushPart(header=pb.PushHeader(writer=writer, first=0, checksums=sums))]
    messages += [pb.PushPart(data=part) for part in parts]
    async with open_channel(address) as channel:
        call = KvTransferStub(channel).Push(iter(messages), timeout=5)  # type: ignore[no-untyped-call]
        return await call.code(), await call.details()


async def offer_raw(address: str, lease: Lease, wrong_sum_of: int) -> str:
    """One offer of all pages whose sums do not fit its bytes; why it was refused."""
    count, size = len(lease.shards[0].pages), len(lease.shards[0].pages) * lease.layout.page_bytes
    thread = PairThread("raw")
    async with open_channel(address) as channel, asyncio.timeout(10):
        stream = KvCollectiveStub(channel).Pair()  # type: ignore[no-untyped-call]
        join = pb.PairJoin(
            sender="raw",
            incarnation=lease.incarnation,
            layout=layout_to_wire(lease.layout),
            device="cpu",
            offer_bytes=size,
        )
        await stream.write(pb.PairRequest(join=join))
        joined = (await stream.read()).joined
        group = PairGroup(
            random_pages(lease.layout, 64),
            name=joined.group,
            rank=PREFILL_RANK,
            backend=joined.backend,
            host="127.0.0.1",
            staging_bytes=size,
            timeout_s=5.0,
        )
        await thread.run(group.connect, ("127.0.0.1", joined.store_port))
        sums = await thread.run(group.stage, ids(*range(count)))
        await stream.write(pb.PairRequest(offer=pb.PairOffer(seq=1, writer=writer_of(lease), first=0, count=count)))
        assert (await stream.read()).ready.seq == 1
        await thread.run(group.send, count, time.monotonic() + 5)
        sums[2 * wrong_sum_of] ^= 0x10
        await stream.write(pb.PairRequest(done=pb.PairDone(seq=1, checksums=sums)))
        reply = await stream.read()
    thread.stop(group.close)
    assert await thread.wait_ended(5)
    return str(reply.refused.reason)


async def test_a_push_waits_for_its_turn_longer_than_it_may_take() -> None:
    side = DecodeSide()
    pair = Pair("grpc")
    stop = await pair.serve(side)
    lease = pair.lease(side, list(range(MAX_PUSHES + 1)))
    transport = GrpcTransport(random_pages(LAYOUT, 64), PREFILL, operation_timeout_s=0.5)
    async with open_channel(pair.address) as channel:
        frozen = [KvTransferStub(channel).Push(timeout=30) for _ in range(MAX_PUSHES)]  # type: ignore[no-untyped-call]
        for page, call in enumerate(frozen):
            header = pb.PushHeader(writer=writer_of(lease), first=page, checksums=[0])
            await call.write(pb.PushPart(header=header))
        await until(lambda: side.book.num_writes == MAX_PUSHES)
        shipment = await transport.open(lease)
        began = time.monotonic()
        await shipment.push(MAX_PUSHES, ids(5))  # its turn comes when those before it are given up
        assert time.monotonic() - began > 1.0
        for call in frozen:
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "not whole within 2 s" in await call.details()
    assert side.memory.read(ids(MAX_PUSHES)) == random_pages(LAYOUT, 64).read(ids(5))
    await shipment.abort("seen enough")
    await transport.close()
    await run(stop)


async def test_a_writer_frozen_in_its_bytes_holds_up_neither_the_next_one_nor_the_end() -> None:
    side = DecodeSide()
    pair = Pair("grpc")
    stop = await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    header = pb.PushHeader(writer=writer_of(lease), first=0, checksums=[0, 0])
    async with open_channel(pair.address) as channel:
        frozen = KvTransferStub(channel).Push(timeout=30)  # type: ignore[no-untyped-call]
        await frozen.write(pb.PushPart(header=header))
        await frozen.write(pb.PushPart(data=bytes(64)))
        await until(lambda: side.book.num_writes == 1)

        newer = renewed(lease)
        side.book.open(newer)
        await ship(await pair.sender().open(newer), 2)
        assert_arrived(side, newer, ids(0, 1))
        side.book.close(lease.lease_id, committed=True)

        await frozen.write(pb.PushPart(data=bytes(64)))
        await frozen.done_writing()
        assert await frozen.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert_arrived(side, newer, ids(0, 1))
    side.assert_at_rest()
    for closer in pair.closers:
        await run(closer)
    await run(stop)


@pytest.mark.parametrize("sizes", [[], [64], [64, 63], [64, 64, 1], [200]])
async def test_lost_and_repeated_parts_of_a_grpc_push_are_refused(sizes: list[int]) -> None:
    side = DecodeSide()
    pair = Pair("grpc")
    stop = await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    code, details = await push_raw(pair.address, lease, [crc32(bytes(64))] * 2, [bytes(size) for size in sizes])
    await run(stop)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "bytes that the header names" in details
    assert side.book.num_writes == 0


async def test_a_late_writer_is_refused(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    shipment = await pair.sender().open(lease)
    await shipment.push(0, ids(1))
    side.book.close(lease.lease_id, committed=False)
    with pytest.raises(TransferFailed, match="ended"):
        await ship(shipment, 2)
    assert side.released == [lease.lease_id]
    side.assert_at_rest()


async def test_after_an_abort_a_renewed_lease_takes_a_second_writer(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    first = await pair.sender().open(lease)
    await first.push(0, ids(60))
    await first.abort("prefill gave up")
    await first.abort("twice is once")
    with pytest.raises(TransferFailed):
        await first.push(1, ids(61))

    newer = renewed(lease)
    side.book.open(newer)
    second = await pair.sender().open(newer)
    await ship(second, 2)
    assert_arrived(side, newer, ids(0, 1))


async def test_a_frozen_writer_cannot_commit_after_the_renewal(pair: Pair) -> None:
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1])
    frozen = await pair.sender().open(lease)
    side.book.open(renewed(lease))
    with pytest.raises(TransferFailed, match="epoch 0, the lease is at 1"):
        await ship(frozen, 1)


@pytest.mark.parametrize("commit_first", [True, False])
async def test_a_commit_and_a_renewal_have_one_winner(pair: Pair, commit_first: bool) -> None:
    """Whoever is told to write may write: a renewal that lost to a commit is told to nobody."""
    side = DecodeSide()
    await pair.serve(side)
    lease = pair.lease(side, [1, 2])
    newer = renewed(lease)
    writer = await pair.sender().open(lease)
    await writer.push(0, ids(10, 11))
    if commit_first:
        await writer.commit(7, 0)
    side.book.open(newer)
    assert [renewal.epoch for renewal in side.renewals] == ([] if commit_first else [newer.epoch])
    if not commit_first:
        with pytest.raises(TransferFailed, match="epoch 0, the lease is at 1"):
            await writer.commit(7, 0)
        second = await pair.sender().open(newer)
        await second.push(0, ids(10, 11))
        await second.commit(7, 0)
    assert [event.epoch for event in side.committed] == [lease.epoch if commit_first else newer.epoch]
    assert_arrived(side, lease, ids(10, 11))
    side.book.close(lease.lease_id, committed=True)
    side.assert_at_rest()


async def test_a_dead_peer_is_an_error_and_its_next_life_a_new_pair(pair: Pair) -> None:
    side = DecodeSide()
    kill = await pair.serve(side)
    transport = pair.sender()
    lease = pair.lease(side, [1])
    shipment = await transport.open(lease)
    await run(kill)
    async with asyncio.timeout(10):
        with pytest.raises(TransferFailed):
            await ship(shipment, 1)

    port = int(pair.address.rpartition(":")[2]) if pair.kind != "loopback" else 0
    reborn, life = DecodeSide(), Incarnation("decode-life-2")
    await pair.serve(reborn, life, port)
    with pytest.raises(TransferFailed):
        await ship(await transport.open(lease), 1)  # the old life does not come back
    again = pair.lease(reborn, [5], life)
    under_way = await transport.open(again)
    with pytest.raises(TransferFailed):
        await ship(await transport.open(lease), 1)  # nor does it disturb the new one
    await ship(under_way, 1)
    assert_arrived(reborn, again, ids(0))


async def test_many_shipments_at_once_all_arrive(pair: Pair) -> None:
    side = DecodeSide(num_pages=64)
    await pair.serve(side)
    transport = pair.sender()
    leases = [pair.lease(side, [2 * number, 2 * number + 1]) for number in range(32)]

    async def one(lease: Lease) -> None:
        await ship(await transport.open(lease), 2)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for lease in leases:
            group.create_task(one(lease))
    assert len(side.committed) == 32
    for lease in leases:
        assert_arrived(side, lease, ids(0, 1))
        side.book.close(lease.lease_id, committed=True)
    side.assert_at_rest()


# --------------------------------------------------------------------------------- peers that die or freeze


class Peer:
    """`tests.transfer_peer` in a process of its own: it ends or freezes itself when its n-th write begins."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @staticmethod
    async def start(signal_name: str, at_write: int, page_bytes: int) -> "Peer":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.transfer_peer",
            signal_name,
            str(at_write),
            str(page_bytes),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])},
        )
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        return Peer(process, line.decode().strip())

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.mark.parametrize("pair", ["grpc", "collective"], indirect=True)
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
async def test_a_peer_that_dies_or_freezes_in_a_page_is_an_error_in_time(pair: Pair, signal_name: str) -> None:
    layout = make_layout(1 << 20)
    peer = await Peer.start(signal_name, 2, layout.page_bytes)
    pair.closers.append(peer.end)
    side = DecodeSide(layout, num_pages=4)
    other_life = Incarnation("other")
    await pair.serve(side, other_life)
    transport = pair.sender(layout, num_pages=4)
    doomed = await transport.open(make_lease([0, 1, 2], layout=layout, address=peer.address, lease_id=LeaseId("peer")))
    await doomed.push(0, ids(0))

    started_s = time.monotonic()
    push = asyncio.create_task(doomed.push(1, ids(1, 2)))
    lease = pair.lease(side, [3], other_life)
    await ship(await transport.open(lease), 1)  # no other pair waits for the frozen one
    assert time.monotonic() - started_s < on_this_machine(1.5)
    with pytest.raises(TransferFailed):
        await push
    assert time.monotonic() - started_s < on_this_machine(2.0 + 1.0)
    if signal_name == "SIGKILL":
        await doomed.abort("the peer is dead")


# ------------------------------------------------------------------------------------------ collective only


@pytest.fixture
async def collective() -> AsyncIterator[Pair]:
    pair = Pair("collective")
    yield pair
    for closer in pair.closers:
        await run(closer)


class OrderedBook(LeaseBook):
    """Remembers in which order writes came."""

    begun: list[LeaseId]

    def begin(self, write: PageWrite) -> WriteTicket:
        self.begun.append(write.lease_id)
        return super().begin(write)


async def test_a_pair_is_one_fifo(collective: Pair) -> None:
    side = DecodeSide()
    book = side.book = side.make_book(OrderedBook)
    book.begun = []
    await collective.serve(side)
    transport = collective.collective(random_pages(LAYOUT, 64))
    leases = [collective.lease(side, [number]) for number in range(20)]
    shipments = [await transport.open(lease) for lease in leases]
    async with asyncio.TaskGroup() as group:
        for shipment in shipments:
            group.create_task(shipment.push(0, ids(1)))
    assert book.begun == [lease.lease_id for lease in leases]
    assert transport.num_groups == 1


async def test_a_cancelled_push_keeps_the_pair_in_step(collective: Pair) -> None:
    side = DecodeSide()
    await collective.serve(side)
    transport = collective.collective(random_pages(LAYOUT, 64))
    first, second = collective.lease(side, [1]), collective.lease(side, [2])
    dropped, kept = await transport.open(first), await transport.open(second)
    push = asyncio.create_task(dropped.push(0, ids(1)))
    await asyncio.sleep(0)
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    await dropped.abort("dropped")
    await ship(kept, 1)
    assert_arrived(side, second, ids(0))
    assert transport.num_groups == 1


async def test_an_unused_group_closes_and_is_made_again(collective: Pair) -> None:
    side = DecodeSide()
    await collective.serve(side)
    transport = collective.collective(random_pages(LAYOUT, 64), idle_group_s=0.05)
    await ship(await transport.open(collective.lease(side, [1])), 1)
    await until(lambda: transport.num_groups == 0)
    again = collective.lease(side, [2])
    await ship(await transport.open(again), 1)
    assert_arrived(side, again, ids(0))


async def test_more_groups_than_allowed_are_refused_by_either_side(collective: Pair) -> None:
    collective.max_groups = 1
    side, other = DecodeSide(), DecodeSide()
    await collective.serve(side)
    lease = collective.lease(side, [1])
    first = collective.collective(random_pages(LAYOUT, 64), max_groups=1)
    await ship(await first.open(lease), 1)

    second = collective.collective(random_pages(LAYOUT, 64), Incarnation("prefill-2"))
    with pytest.raises(TransferFailed, match="max_groups"):
        await second.open(collective.lease(side, [2]))
    await collective.serve(other, Incarnation("decode-2"))
    with pytest.raises(TransferFailed, match="max_groups"):
        await first.open(collective.lease(other, [1], Incarnation("decode-2")))


def test_checksums_are_the_plain_and_the_weighted_sum() -> None:
    for words in (2, 6, 1024, 1536, 4096):
        data = torch.randint(-(2**31), 2**31 - 1, (3, words), dtype=torch.int32)
        wide, places = data.to(torch.int64), torch.arange(words)
        expected = torch.stack([wide.sum(1), (wide * places).sum(1)], dim=1).flatten().tolist()
        assert checksums(data.view(torch.uint8).flatten(), 3) == expected
        data[1, 0], data[1, 1] = int(data[1, 1]), int(data[1, 0]) ^ 1
        changed = checksums(data.view(torch.uint8).flatten(), 3)
        assert [now == then for now, then in zip(changed, expected, strict=True)].count(False) >= 1
