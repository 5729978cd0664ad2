"""Connections stay open when idle (a server that closes first resets the request that is just on its way), and what is
sent over them goes in as few pieces as can be.
"""

import asyncio
import json
import socket
import struct

import pytest

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


def segments(writer: asyncio.StreamWriter) -> int:
    """With data, that came: `tcpi_data_segs_in` of Linux's `struct tcp_info`. No write waits for another."""
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("=I", info, 152)[0])


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_head_comes_with_the_first_bytes(streamed: bool) -> None:
    body = json.dumps({"model": "fake", "prompt": "Hi", "max_tokens": 3, "stream": streamed}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with gateway() as served, asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            writer.write(head + body)
            data = b""
            while not data.endswith((b"\r\n0\r\n\r\n", b"}")):
                data += await reader.read(1 << 16)
            assert data.startswith(b"HTTP/1.1 200")
            assert segments(writer) == (data.count(b"data: ") if streamed else 1)
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_head_without_a_body_comes_too() -> None:
    """Also before the connection ends."""
    async with gateway() as served, asyncio.timeout(TIMEOUT_S):
        kept = await served.client.head("/health/live")
        closed = await served.client.head("/health/live", headers={"connection": "close"})
    assert (kept.status_code, kept.content, closed.status_code, closed.content) == (200, b"", 200, b"")
    assert "server" not in kept.headers
