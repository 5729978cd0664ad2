"""What the router costs an answer, with workers that cost nothing (`benchmarks.instant_workers`).

    python -m benchmarks.gateway --tokenizer DIR --json gateway.json

The router is one process pinned to one core; workers and load are this process, pinned to another.

    streams      64 streams of /v1/completions, a token an event: tokens a second, and a second of the router's CPU
    requests     32 clients, short prompts, whole answers of one token, and of 16: the same for requests
    first byte   from the request's last byte to the first token's text, at 1k and 8k tokens, by one client and by 64

A token is answered as soon as the router asks for it, so a first byte's time is what the router adds, and the hops. Of
it, parsing the body, tokenizing, and hashing and choosing are told apart, by the router's own clock: as means, and for
one client subtracted request by request. Of what is then left, one client is also told what the two round trips to the
workers take without a router (`benchmarks.gateway_direct`): the difference is what the router adds to a first byte.
Without `--tokenizer` a token is a byte. Exit code 1 when an answer was wrong.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil

from benchmarks import gateway_direct
from benchmarks.gateway_process import MODEL, OVER, SPANS, Setting, Spans, make_tokenizer, run
from benchmarks.instant_workers import InstantWorkers
from benchmarks.texts import texts
from twostroke.cluster.telemetry.logs import configure_logging

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
STEPS_AHEAD = 4
"""Steps that may be on their way to the clients: so few that each token is an event, so many that nobody idles."""
MARK = "~"
"""The text of every token; it occurs nowhere else in an answer."""


@dataclass
class Tally:
    """Tokens that workers may send and clients have seen."""

    num_sent: int = 0
    num_seen: int = 0
    is_paced: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, *, is_paced: bool) -> None:
        self.is_paced = is_paced
        self.num_sent = self.num_seen  # those of prefill workers were seen, and not counted as sent

    def may_step(self, num_tokens: int) -> bool:
        if self.is_paced and self.num_sent - self.num_seen > STEPS_AHEAD * num_tokens:
            return False
        self.num_sent += num_tokens
        return True

    def saw(self, num_tokens: int) -> None:
        self.num_seen += num_tokens
        self.news.set()


class Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._data = bytearray()
        self._first_at = 0.0
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        count = data.count(MARK.encode())
        if count:
            self._first_at = self._first_at or time.perf_counter()
            self._tally.saw(count)
        self._data += data
        if self._ended is not None and not self._ended.done() and self._is_whole():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"the router closed: {error}"))

    def _is_whole(self) -> bool:
        if self._data.endswith(b"\r\n0\r\n\r\n"):
            return True
        head, found, body = bytes(self._data[:2048]).partition(b"\r\n\r\n")
        place = head.lower().find(b"content-length:")
        if not found or place < 0:
            return False
        return len(self._data) - len(head) - 4 >= int(head[place + 15 :].split(b"\r\n")[0])

    async def ask(self, request: bytes) -> tuple[float, bytes]:
        """Seconds to the first token, and the answer with its head."""
        self._data.clear()
        self._first_at = 0.0
        self._ended = asyncio.get_running_loop().create_future()
        sent_at = time.perf_counter()
        self._transport.write(request)
        await asyncio.wait_for(self._ended, ANSWER_TIMEOUT_S)
        return self._first_at - sent_at, bytes(self._data)

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    clients: int
    prompt_tokens: int
    max_tokens: int
    requests: Iterator[bytes]
    is_paced: bool = False
    """Workers wait for the clients, so that each token is an event of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """Rates are a second of wall time, and a second of the router's CPU; times in milliseconds."""

    case: str
    clients: int
    prompt_tokens: int
    max_tokens: int
    requests: int
    seconds: float
    router_cpu_share: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    requests_per_s: float
    requests_per_cpu_s: float
    events_per_token: float
    first_p50_ms: float
    first_p99_ms: float
    parse_ms: float
    tokenize_ms: float
    choose_ms: float
    rest_p50_ms: float | None
    """Of the first byte, beyond tokenizing and hashing; for one client."""
    direct_p50_ms: float | None
    """The first token without a router; for one client."""


class Bench:
    """One router, by its address and its process."""

    def __init__(
        self, host: str, port: int, tally: Tally, router: psutil.Process, pipe: Pipe, direct_ms: Mapping[int, float]
    ) -> None:
        self._direct_ms = direct_ms
        self._pipe = pipe
        self._host = host
        self._port = port
        self._tally = tally
        self._router = router

    async def measure(self, case: Case, seconds: float) -> Row:
        """A closed loop for about `seconds`. Raises ValueError when an answer is not of the tokens asked for."""
        self._tally.begin(is_paced=case.is_paced)
        await self._spans()
        cpu_before = self._cpu_s()
        tokens_before, started_at = self._tally.num_seen, time.perf_counter()
        firsts, num_events = await self._load(case, started_at + seconds)
        elapsed_s, cpu_s = time.perf_counter() - started_at, self._cpu_s() - cpu_before
        spans = await self._spans()
        num_tokens = self._tally.num_seen - tokens_before
        alone = case.clients == 1
        return Row(
            case=case.name,
            clients=case.clients,
            prompt_tokens=case.prompt_tokens,
            max_tokens=case.max_tokens,
            requests=len(firsts),
            seconds=elapsed_s,
            router_cpu_share=cpu_s / elapsed_s,
            tokens_per_s=num_tokens / elapsed_s,
            tokens_per_cpu_s=num_tokens / cpu_s,
            requests_per_s=len(firsts) / elapsed_s,
            requests_per_cpu_s=len(firsts) / cpu_s,
            events_per_token=num_events / max(1, num_tokens),
            first_p50_ms=1000 * statistics.median(firsts),
            first_p99_ms=1000 * sorted(firsts)[int(len(firsts) * 0.99)],
            parse_ms=statistics.mean(spans["parse"]),
            tokenize_ms=statistics.mean(spans["tokenize"]),
            choose_ms=statistics.mean(spans["choose"]),
            rest_p50_ms=_rest_p50_ms(firsts, spans) if alone else None,
            direct_p50_ms=self._direct_ms.get(case.prompt_tokens) if alone else None,
        )

    async def _load(self, case: Case, ends_at: float) -> tuple[list[float], int]:
        """Of each answer the seconds to its first token; and all events."""
        firsts: list[float] = []
        num_events = 0

        async def client(connection: Connection) -> None:
            nonlocal num_events
            while time.perf_counter() < ends_at:
                first_s, answer = await connection.ask(next(case.requests))
                if answer.count(MARK.encode()) != case.max_tokens:
                    raise ValueError(f"{case.name}: an answer is not of {case.max_tokens} tokens: {answer[:2000]!r}")
                firsts.append(first_s)
                num_events += answer.count(b"data: {")

        connections = [await self._connect() for _ in range(case.clients)]
        try:
            await asyncio.gather(*(client(connection) for connection in connections))
        finally:
            for connection in connections:
                connection.close()
        return firsts, num_events

    def _cpu_s(self) -> float:
        times = self._router.cpu_times()
        return float(times.user + times.system)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._tally), self._host, self._port)
        return connection

    async def _spans(self) -> Spans:
        """Since the last time. Raises TimeoutError."""
        self._pipe.send(SPANS)
        if not await asyncio.to_thread(self._pipe.poll, ANSWER_TIMEOUT_S):
            raise TimeoutError("the router does not say what its requests took")
        spans: Spans = self._pipe.recv()
        return spans


def _rest_p50_ms(firsts: Sequence[float], spans: Spans) -> float:
    """Raises ValueError when the requests were not one after the other, each placed once."""
    taken = zip(firsts, spans["tokenize"], spans["choose"], strict=True)
    return statistics.median(1000 * first - tokenize - choose for first, tokenize, choose in taken)


def requests(num_tokens: int, max_tokens: int, *, stream: bool, words: bool) -> Iterator[bytes]:
    """Round and round."""
    made: list[bytes] = []
    for prompt in texts(num_tokens, words=words):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        made.append(f"{head}{len(data)}\r\n\r\n".encode() + data)
    return cycle(made)


def cases(sizes: Sequence[int], *, words: bool) -> Iterator[Case]:
    """Made as they are needed: the requests of one with long prompts are some 50 MB."""
    yield Case("streams", 64, 8, 256, requests(8, 256, stream=True, words=words), is_paced=True)
    for max_tokens in (1, 16):
        yield Case("requests", 32, 8, max_tokens, requests(8, max_tokens, stream=False, words=words))
    for size in sizes:
        asked = requests(size, 2, stream=True, words=words)
        for clients in (1, 64):
            yield Case("first byte", clients, size, 2, asked)


async def measure_all(bench: Bench, options: argparse.Namespace) -> list[Row]:
    words = options.tokenizer is not None
    await bench.measure(Case("warm-up", 4, 8, 8, requests(8, 8, stream=True, words=words)), min(1.0, options.seconds))
    rows: list[Row] = []
    for case in cases(options.sizes, words=words):
        rows.append(await bench.measure(case, options.seconds))
        print_row(rows[-1])
    return rows


def print_row(row: Row) -> None:
    if row.case == "streams":
        told = (
            f"{row.tokens_per_s:8.0f} tokens/s, {row.tokens_per_cpu_s:.0f} a CPU second, "
            f"{row.events_per_token:.2f} events a token"
        )
    elif row.case == "requests":
        told = f"{row.requests_per_s:8.0f} requests/s, {row.requests_per_cpu_s:.0f} a CPU second"
    else:
        told = (
            f"{row.first_p50_ms:8.2f} ms p50, {row.first_p99_ms:.2f} p99: tokenize {row.tokenize_ms:.2f}, "
            f"hash and choose {row.choose_ms:.2f}, parse {row.parse_ms:.2f}"
        )
        if row.rest_p50_ms is not None and row.direct_p50_ms is not None:
            told += (
                f"; beyond tokenizing and hashing {row.rest_p50_ms:.2f} p50, {row.direct_p50_ms:.2f} without a router, "
                f"which adds {row.rest_p50_ms - row.direct_p50_ms:.2f}"
            )
    what = f"{row.case:10} {row.clients:3} clients {row.prompt_tokens:5} + {row.max_tokens:3} tokens"
    print(f"{what} {told} ({row.router_cpu_share:.0%} of its core)", flush=True)


async def run_all(options: argparse.Namespace, cores: list[int]) -> list[Row]:
    tokenizer = make_tokenizer(options.tokenizer)
    tally = Tally()
    [token] = tokenizer.encode(MARK, add_special_tokens=False)
    workers = InstantWorkers(token, tally.may_step, tally.news)
    addresses = tuple(await workers.open())
    core = cores[0] if len(cores) > 1 else None
    try:
        asking = gateway_direct.Asking(addresses, core, options.tokenizer, tuple(options.sizes), options.seconds / 2)
        direct_ms = await gateway_direct.measure(asking)
        await workers.wait_free()
        return await measure_router(
            Setting(addresses, core, options.tokenizer, options.profile), tally, direct_ms, options
        )
    finally:
        await workers.close()


async def measure_router(
    setting: Setting, tally: Tally, direct_ms: Mapping[int, float], options: argparse.Namespace
) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    router = context.Process(target=run, args=(setting, theirs), daemon=True)
    router.start()
    try:
        if not await asyncio.to_thread(ours.poll, START_TIMEOUT_S):
            raise TimeoutError("the router did not start")
        host, port = ours.recv().rsplit(":", 1)
        bench = Bench(host, int(port), tally, psutil.Process(router.pid), ours, direct_ms)
        return await measure_all(bench, options)
    finally:
        ours.send(OVER)
        await asyncio.to_thread(router.join, 20.0)
        if router.is_alive():
            router.terminate()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the seven cases")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1024, 8192], help="tokens of the prompts of `first byte`"
    )
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json; default: bytes")
    parser.add_argument("--profile", type=Path, help="cProfile of the router goes there; figures are then no good")
    parser.add_argument("--json", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    configure_logging("warning", "console", "benchmark")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[1:]))
    else:
        print("one CPU only: the router shares it with workers and load", file=sys.stderr)
    try:
        rows = asyncio.run(run_all(options, cores))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        facts = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
