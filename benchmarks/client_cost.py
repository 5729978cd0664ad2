"""What the load client itself costs: CPU microseconds a streamed chunk, for `sse_client`, aiohttp and httpx.

    python -m benchmarks.client_cost

A trivial server in a child process streams chunks to 8 connections; the figure is this process's CPU time alone.
All three stamp each chunk. `sse_client` parses after the run: the second figure of its row adds that.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import httpx

from benchmarks.sse_client import Piece, Target, exchange, read_answer

CHUNK = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
FRAME = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)
TIMEOUT_S = 60.0
CONNECTIONS = 8


def _serve(port: Connection, num_chunks: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(num_chunks):
            writer.write(FRAME)
            await writer.drain()
            await asyncio.sleep(0.002)
        done = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await asyncio.sleep(4 * TIMEOUT_S)

    asyncio.run(run())


async def _with_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                json.loads(line[6:])
                time.perf_counter()


async def _with_httpx(url: str) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client, client.stream("GET", url) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                json.loads(line[6:])
                time.perf_counter()


async def _cpu_s(one: Callable[[], Awaitable[object]]) -> float:
    began_s = time.process_time()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return time.process_time() - began_s


async def measure(port: int, num_chunks: int) -> dict[str, float]:
    """Microseconds a chunk."""
    url, target = f"http://127.0.0.1:{port}/", Target.parse(f"http://127.0.0.1:{port}")
    recorded: list[list[Piece]] = []

    async def with_ours() -> None:
        recorded.append(await exchange(target, target.request("GET", "/"), TIMEOUT_S))

    figures = {"sse_client": await _cpu_s(with_ours)}
    began_s = time.process_time()
    for pieces in recorded:
        if read_answer(pieces, 0.0, num_chunks).num_tokens != num_chunks:
            raise RuntimeError("chunks were lost")
    figures["sse_client, parsed"] = figures["sse_client"] + time.process_time() - began_s
    figures["aiohttp"] = await _cpu_s(lambda: _with_aiohttp(url))
    figures["httpx"] = await _cpu_s(lambda: _with_httpx(url))
    return {name: cpu_s / (num_chunks * CONNECTIONS) * 1e6 for name, cpu_s in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1000, help="for each of the connections")
    num_chunks = parser.parse_args().chunks
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, num_chunks), daemon=True)
    server.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("the server did not start")
        for name, figure in asyncio.run(measure(ours.recv(), num_chunks)).items():
            print(f"{name:20} {figure:6.1f} us a chunk")
    finally:
        server.terminate()
        server.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
