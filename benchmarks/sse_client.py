"""One HTTP request on one connection, recorded as it arrives and understood after the run.

The client shares its machine with the server, so while the run lasts it only stamps and keeps what the socket gives.
Headers, transfer chunks, events and JSON are parsed when all requests are over. `benchmarks.client_cost` on a busy
2-core Xeon: 30 us of CPU a chunk while the run lasts (40 with the parsing), against 66 for aiohttp and 181 for httpx.

An exchange ends when the server closes, when Content-Length is reached, or at the last transfer chunk. Setting up the
connection is part of the time to the first token.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.stats import Answer

MAX_RESPONSE_BYTES = 64 << 20
_LAST_CHUNK = b"\r\n0\r\n\r\n"

Piece = tuple[float, bytes]
"""Time of arrival (`time.perf_counter`) and what arrived."""


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http(s) URL")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\nConnection: close\r\n"
            f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_bytes = 0
        self._head_known = False
        self._end_at: int | None = None
        self._tail: bytes | None = None

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        self._num_bytes += len(data)
        try:
            self._read_head()
        except ValueError:
            self._end(None)  # Not HTTP: whoever reads the pieces finds that out again, and says so.
        if self._tail is not None:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK or (self._end_at is not None and self._num_bytes >= self._end_at):
            self._end(None)
        elif self._num_bytes > MAX_RESPONSE_BYTES:
            self._end(ConnectionError("response too large"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def _read_head(self) -> None:
        if self._head_known:
            return
        start = b"".join(data for _, data in self.pieces)
        length = start.find(b"\r\n\r\n")
        if length < 0:
            return
        self._head_known = True
        _, headers = _read_headers(start[:length])
        if headers.get("transfer-encoding") == "chunked":
            self._tail = b""
        elif "content-length" in headers:
            self._end_at = length + 4 + int(headers["content-length"])

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def exchange(target: Target, request: bytes, timeout_s: float) -> list[Piece]:
    """Raises TimeoutError past the deadline and OSError when the connection fails."""
    async with asyncio.timeout(timeout_s):
        transport, recorder = await asyncio.get_running_loop().create_connection(
            _Recorder, target.host, target.port, ssl=target.tls or None
        )
        try:
            transport.write(request)
            await recorder.ended
        except BaseException:
            transport.abort()
            raise
        transport.close()
        return recorder.pieces


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: list[Piece]
    complete: bool

    def json(self) -> Any:
        return json.loads(b"".join(data for _, data in self.body))


def _read_headers(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("no status line")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def read_response(pieces: Sequence[Piece]) -> Response:
    """Raises ValueError for what is not HTTP/1.1."""
    head, status, in_body, num_bytes = b"", 0, False, 0
    headers: dict[str, str] = {}
    body: list[Piece] = []
    chunks: _Dechunker | None = None
    for at_s, data in pieces:
        if not in_body:
            head, found, data = (head + data).partition(b"\r\n\r\n")
            if not found:
                continue
            in_body = True
            status, headers = _read_headers(head)
            chunks = _Dechunker() if headers.get("transfer-encoding") == "chunked" else None
        content = chunks.feed(data) if chunks else data
        num_bytes += len(content)
        body.append((at_s, content))
    if not in_body:
        raise ValueError("the server closed before it answered")
    complete = chunks.ended if chunks else num_bytes >= int(headers.get("content-length", 0))
    return Response(status, body, complete)


class _Dechunker:
    def __init__(self) -> None:
        self.ended = False
        self._buffer = bytearray()
        self._left = 0
        """Bytes left of the present chunk, its closing CRLF included."""

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        content = bytearray()
        while not self.ended:
            if self._left == 0:
                line, found, rest = self._buffer.partition(b"\r\n")
                if not found:
                    break
                size = int(line.split(b";")[0], 16)
                self._buffer, self._left, self.ended = rest, size + 2, size == 0
                continue
            taken = self._buffer[: self._left]
            if not taken:
                break
            content += taken[: max(0, self._left - 2)]
            del self._buffer[: len(taken)]
            self._left -= len(taken)
        return bytes(content)


def events(body: Sequence[Piece]) -> Iterator[tuple[float, str]]:
    """Each `data:` line, with the time at which its end arrived."""
    rest = b""
    for at_s, data in body:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, line[5:].strip().decode()


def read_answer(pieces: Sequence[Piece], started_s: float, max_tokens: int) -> Answer:
    """Never raises: what is wrong with a response becomes the answer's `error`."""
    ended_s = pieces[-1][0] if pieces else started_s
    try:
        return _read_answer(read_response(pieces), started_s, ended_s, max_tokens)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return Answer(started_s, ended_s, max_tokens, error="malformed" if pieces else "closed without an answer")


def _read_answer(response: Response, started_s: float, ended_s: float, max_tokens: int) -> Answer:
    if response.status != 200:
        return Answer(started_s, ended_s, max_tokens, error=f"http {response.status}")
    arrivals: list[float] = []
    finished_s: float | None = None
    num_tokens: int | None = None
    done = False
    for at_s, data in events(response.body):
        if data == "[DONE]":
            done = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            kind = chunk["error"].get("type") or chunk["error"].get("code") or "error"
            return Answer(started_s, ended_s, max_tokens, error=f"in stream: {kind}")
        if chunk.get("usage"):
            num_tokens = int(chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason") and not choice.get("text"):
                finished_s = at_s
            else:
                arrivals.append(at_s)
    # A last chunk without text brings a token only where one is missing (its text may be half a character).
    if finished_s is not None and len(arrivals) < (num_tokens or 0):
        arrivals.append(finished_s)
    if not done or not response.complete:
        return Answer(started_s, ended_s, max_tokens, error="truncated")
    if not arrivals or num_tokens == 0:
        return Answer(started_s, ended_s, max_tokens, error="no tokens")
    has_usage = num_tokens is not None
    total = len(arrivals) if num_tokens is None else num_tokens
    return Answer(started_s, ended_s, max_tokens, tuple(arrivals), total, has_usage)
