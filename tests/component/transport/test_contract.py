"""One contract, all transports: pages arrive whole, checked and under a live lease, or the sender hears why not."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

import grpc
import pytest

from tests.transfer_builders import DECODE, LAYOUT, PREFILL, DecodeSide, make_layout, make_lease, random_pages, renewed
from twostroke.cluster.core.errors import LayoutMismatch, TransferFailed
from twostroke.cluster.core.ids import Incarnation, LeaseId, PageId
from twostroke.cluster.core.layout import PageLayout
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.transport.loopback import LoopbackTransport, Receiver
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.wire.channel import bind, new_server, open_channel
from twostroke.proto.v1 import kv_transfer_pb2 as pb
from twostroke.proto.v1.kv_transfer_pb2_grpc import KvTransferStub

Tamper = Callable[[bytearray], None]


@dataclass
class Pair:
    """A sender and a decode side, joined by one kind of transport."""

    kind: str
    closers: list[Callable[[], object]] = field(default_factory=list)
    receivers: dict[Incarnation, Receiver] = field(default_factory=dict)
    address: str = "127.0.0.1:1"

    async def serve(self, side: DecodeSide, incarnation: Incarnation = DECODE, port: int = 0) -> Callable[[], object]:
        """Start a life of the decode worker; returns what kills it."""
        if self.kind == "loopback":
            self.receivers[incarnation] = Receiver(side.book, side.memory)
            return lambda: self.receivers.pop(incarnation)
        server = new_server()
        add_transfer_services(server, side.book, side.memory, incarnation)
        self.address = f"127.0.0.1:{bind(server, '127.0.0.1', port)}"
        await server.start()

        async def stop() -> None:
            await server.stop(None)

        self.closers.append(stop)
        return stop

    def sender(self, layout: PageLayout = LAYOUT, num_pages: int = 64, tamper: Tamper | None = None) -> Transport:
        memory = random_pages(layout, num_pages)
        transport: Transport
        if self.kind == "loopback":
            transport = LoopbackTransport(memory, self.receivers, tamper)
        else:
            transport = GrpcTransport(memory, PREFILL, message_bytes=64 << 10, operation_timeout_s=2.0)
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


@pytest.fixture(params=["loopback", "grpc"])
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

    shipment = await transport.open(lease)
    await shipment.push(0, [PageId(page) for page in range(count)])
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
    with pytest.raises((LayoutMismatch, TransferFailed), match="model_fingerprint"):
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
    await ship(await transport.open(again), 1)
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
