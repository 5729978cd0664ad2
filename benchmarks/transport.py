"""How fast pages travel between two processes of this machine, for each transport, beside raw TCP in the same run.

    python -m benchmarks.transport [--megabytes 256] [--page-kib 768]

Prints GB/s and the ratio to TCP. The ratio is what to compare between machines and runs. About 10 s.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, RequestId, WorkerId
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.messages import Lease, LeaseShard
from twostroke.cluster.transport.base import Transport
from twostroke.cluster.transport.collective import CollectiveTransport
from twostroke.cluster.transport.collective_server import CollectiveServicer
from twostroke.cluster.transport.grpc import GrpcTransport
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.decode_worker.intake import LeaseBook
from twostroke.proto.v1.kv_transfer_pb2_grpc import add_KvCollectiveServicer_to_server

HOST = "127.0.0.1"
DECODE, PREFILL = Incarnation("bench-decode"), Incarnation("bench-prefill")
RUNS = 5
LIFE_S = 120.0


def layout_of(page_kib: int) -> PageLayout:
    return gqa_layout(model_fingerprint="bench", layers=1, kv_heads=1, head_dim=page_kib, dtype="uint32", page_size=128)


def lease_of(name: str, layout: PageLayout, num_pages: int, address: str) -> Lease:
    return Lease(
        lease_id=LeaseId(name),
        job=JobId(RequestId(name), 0, 0),
        epoch=0,
        nonce=b"0123456789abcdef",
        worker_id=WorkerId("bench"),
        incarnation=DECODE,
        layout=layout,
        transports=("collective", "grpc"),
        device="cpu",
        num_held=0,
        shards=(LeaseShard(0, address, 0, 1, tuple(PageId(page) for page in range(num_pages))),),
        ttl_s=60.0,
    )


def names() -> list[str]:
    return [f"{kind}-{run}" for kind in ("grpc", "collective") for run in range(RUNS + 1)]


def drain_tcp(listener: socket.socket) -> None:
    """Read everything of every connection, and answer its end with one byte."""
    buffer = bytearray(1 << 20)
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv_into(buffer):
                pass
            connection.sendall(b"x")


async def serve(page_kib: int, num_pages: int) -> None:
    """The decode side, in a process of its own. Prints its ports."""
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=drain_tcp, args=(listener,), daemon=True).start()
    layout = layout_of(page_kib)
    memory = BytePages(layout, num_pages)
    book = LeaseBook(layout, *[lambda _: None] * 4)
    server = new_server()
    add_transfer_services(server, book, memory, DECODE)
    add_KvCollectiveServicer_to_server(CollectiveServicer(book, memory, DECODE, host=HOST), server)  # type: ignore[no-untyped-call]
    address = f"{HOST}:{bind(server, HOST, 0)}"
    for name in names():
        book.open(lease_of(name, layout, num_pages, address))
    await server.start()
    print(json.dumps({"address": address, "tcp": listener.getsockname()[1]}), flush=True)
    await asyncio.sleep(LIFE_S)


def tcp_once(port: int, data: memoryview) -> float:
    """Seconds until the other side has read all of it."""
    with socket.create_connection((HOST, port)) as connection:
        started_s = time.perf_counter()
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return time.perf_counter() - started_s


async def ship_once(transport: Transport, lease: Lease) -> float:
    pages = lease.shards[0].pages
    started_s = time.perf_counter()
    shipment = await transport.open(lease)
    await shipment.push(0, pages)
    await shipment.commit(1, 0)
    return time.perf_counter() - started_s


async def measure(address: str, tcp_port: int, page_kib: int, num_pages: int) -> None:
    layout = layout_of(page_kib)
    memory = BytePages(layout, num_pages)
    data = memory.read([PageId(page) for page in range(num_pages)])
    gigabytes = len(data) / 1e9
    tcp = gigabytes / statistics.median(tcp_once(tcp_port, data) for _ in range(RUNS))
    print(f"{'tcp':12s} {tcp:6.2f} GB/s")
    makers: dict[str, Callable[[], Transport]] = {
        "grpc": lambda: GrpcTransport(memory, PREFILL),
        "collective": lambda: CollectiveTransport(memory, PREFILL, host=HOST),
    }
    for kind, make in makers.items():
        transport = make()
        times = [
            await ship_once(transport, lease_of(f"{kind}-{run}", layout, num_pages, address)) for run in range(RUNS + 1)
        ]
        await transport.close()
        rate = gigabytes / statistics.median(times[1:])  # the first makes the pair
        print(f"{kind:12s} {rate:6.2f} GB/s   {rate / tcp:5.1%} of tcp   first {times[0]:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of one shipment")
    parser.add_argument("--page-kib", type=int, default=768, help="size of a page")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    num_pages = max(1, arguments.megabytes * 1024 // arguments.page_kib)
    if arguments.serve:
        asyncio.run(serve(arguments.page_kib, num_pages))
        return
    command = [sys.executable, "-m", "benchmarks.transport", "--serve"]
    command += ["--megabytes", str(arguments.megabytes), "--page-kib", str(arguments.page_kib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            ports = json.loads(child.stdout.readline())
            asyncio.run(measure(ports["address"], ports["tcp"], arguments.page_kib, num_pages))
        finally:
            child.kill()


if __name__ == "__main__":
    main()
