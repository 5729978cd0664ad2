"""A server of the cluster seen by a bare HTTP/2 client."""

import asyncio
import struct

from twostroke.cluster.wire.channel import bind, new_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
NUM_PINGS = 8


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", 0) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Kind, flags and payload."""
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3]))


async def test_pings_that_waited_while_a_process_stood_still_end_no_connection() -> None:
    """They come one right after the other, with no frame of the server's own between them."""
    server = new_server()
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS))
    async with asyncio.timeout(10):
        for number in range(NUM_PINGS):
            writer.write(frame(PING, number.to_bytes(8)))
            kind, flags, payload = 0, 0, b""
            while (kind, flags) != (PING, ACK):
                kind, flags, payload = await read_frame(reader)
                assert kind != GOAWAY, payload
            assert payload == number.to_bytes(8)
    writer.close()
    await writer.wait_closed()
    await server.stop(None)
