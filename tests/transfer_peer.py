"""A decode side in a process of its own that ends or freezes itself in the middle of a write.

    python -m tests.transfer_peer SIGKILL 2 1048576     # at its second write, with pages of 1 MiB

Prints its address. It has one open lease, `peer`, of pages 0, 1, 2.
"""

import asyncio
import os
import signal
import sys

from tests.transfer_builders import DECODE, DecodeSide, make_layout, make_lease
from twostroke.cluster.core.ids import LeaseId
from twostroke.cluster.transport.base import PageWrite, WriteTicket
from twostroke.cluster.transport.collective_server import CollectiveServicer
from twostroke.cluster.transport.server import add_transfer_services
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.decode_worker.intake import LeaseBook
from twostroke.proto.v1.kv_transfer_pb2_grpc import add_KvCollectiveServicer_to_server

LIFE_S = 60.0


class MortalBook(LeaseBook):
    """Sends this process a signal when a certain write begins."""

    signal_number = signal.SIGKILL
    writes_left = 1

    def begin(self, write: PageWrite) -> WriteTicket:
        ticket = super().begin(write)
        self.writes_left -= 1
        if self.writes_left == 0:
            os.kill(os.getpid(), self.signal_number)
        return ticket


async def main(signal_name: str, at_write: int, page_bytes: int) -> None:
    layout = make_layout(page_bytes)
    side = DecodeSide(layout, num_pages=4)
    book = side.make_book(MortalBook)
    book.signal_number, book.writes_left = signal.Signals[signal_name], at_write
    server = new_server()
    add_transfer_services(server, book, side.memory, DECODE)
    servicer = CollectiveServicer(book, side.memory, DECODE, host="127.0.0.1", operation_timeout_s=2.0)
    add_KvCollectiveServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    book.open(make_lease([0, 1, 2], layout=layout, address=address, lease_id=LeaseId("peer")))
    await server.start()
    print(address, flush=True)
    await asyncio.sleep(LIFE_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
