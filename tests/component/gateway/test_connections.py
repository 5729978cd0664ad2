"""An idle connection stays open: a server that closes it first resets the request that is just on its way."""

import asyncio

from tests.gateway_server import TIMEOUT_S, gateway

IDLE_S = 6.0
"""More than uvicorn keeps one by itself, 5 s."""
REQUEST = b"GET /health/live HTTP/1.1\r\nHost: here\r\n\r\n"


async def test_an_idle_connection_takes_another_request() -> None:
    async with gateway() as served, asyncio.timeout(TIMEOUT_S + IDLE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            for idle_s in (0.0, IDLE_S):
                await asyncio.sleep(idle_s)
                writer.write(REQUEST)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
        finally:
            writer.close()
            await writer.wait_closed()
