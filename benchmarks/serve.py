"""Load on any OpenAI-compatible server, and what its users would feel.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 8 --input-len 256 --output-len 64

Without `--rate` a closed loop: `--concurrency` users who each ask again as soon as they are answered. With `--rate`,
or with a trace's own times, an open loop: requests start when due, however many are under way. Each is
a streamed POST /v1/completions of token ids, temperature 0, `ignore_eos`. What the figures mean: `benchmarks.stats`.

A server with a prefix cache answers a prompt faster the second time: give each run against it another `--seed`.
Exit code: 0; 1 when any request failed; 2 when nothing could be asked.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.datasets import FIRST_ID, Ask, Clip, Encode, mooncake, sharegpt, synthetic, with_poisson_arrivals
from benchmarks.sse_client import Piece, Target, exchange, read_answer, read_response
from benchmarks.stats import Answer, Slo, Spread, Summary, summarize

PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a reader needs to believe a figure, or to measure it again."""

    label: str
    model: str
    summary: Summary
    client_cpu_share: float
    """Of one core, over the run."""
    max_start_lag_ms: float
    """The latest that the open loop sent a request after it was due; 0 in a closed loop."""
    configuration: dict[str, Any]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests ready to send."""

    target: Target
    asks: list[Ask]
    requests: list[bytes]
    concurrency: int
    timeout_s: float

    @classmethod
    def prepare(cls, target: Target, asks: list[Ask], model: str, concurrency: int, timeout_s: float) -> "Load":
        return cls(target, asks, [_completion(target, model, ask) for ask in asks], concurrency, timeout_s)


@dataclass(slots=True)
class _Recording:
    started_s: float
    sent_s: float
    ended_s: float = 0.0
    pieces: Sequence[Piece] = ()
    error: str | None = None


def _completion(target: Target, model: str, ask: Ask) -> bytes:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return target.request("POST", "/v1/completions", json.dumps(body, separators=(",", ":")).encode())


async def _send(load: Load, number: int, due_s: float | None) -> _Recording:
    sent_s = time.perf_counter()
    recording = _Recording(sent_s if due_s is None else due_s, sent_s)
    try:
        recording.pieces = await exchange(load.target, load.requests[number], load.timeout_s)
    except TimeoutError:
        recording.error = "timeout"
    except (OSError, ValueError) as error:
        recording.error = f"connection: {type(error).__name__}"
    recording.ended_s = time.perf_counter()
    return recording


async def _closed_loop(load: Load) -> list[_Recording]:
    recordings: dict[int, _Recording] = {}
    waiting: Iterator[int] = iter(range(len(load.asks)))

    async def user() -> None:
        for number in waiting:  # Shared: each user takes the next one.
            recordings[number] = await _send(load, number, None)

    async with asyncio.TaskGroup() as users:
        for _ in range(min(load.concurrency, len(load.asks))):
            users.create_task(user())
    return [recordings[number] for number in range(len(load.asks))]


async def _open_loop(load: Load) -> list[_Recording]:
    start_s = time.perf_counter()

    async def at_its_time(number: int, due_s: float) -> _Recording:
        await asyncio.sleep(start_s + due_s - time.perf_counter())
        return await _send(load, number, start_s + due_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at_its_time(number, ask.due_s or 0.0)) for number, ask in enumerate(load.asks)]
    return [task.result() for task in tasks]


async def run_load(load: Load) -> tuple[list[Answer], float, float]:
    """Answers in the order of the asks, the client's CPU share of a core, and its longest lag in seconds."""
    is_open = any(ask.due_s is not None for ask in load.asks)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    recordings = await (_open_loop(load) if is_open else _closed_loop(load))
    cpu_share = (time.process_time() - began_cpu_s) / max(time.perf_counter() - began_s, 1e-9)
    answers = []
    for ask, recording in zip(load.asks, recordings, strict=True):
        if recording.error is not None:
            answers.append(Answer(recording.started_s, recording.ended_s, ask.max_tokens, error=recording.error))
        else:
            answers.append(read_answer(recording.pieces, recording.started_s, ask.max_tokens))
    return answers, cpu_share, max((r.sent_s - r.started_s for r in recordings), default=0.0)


async def _get(target: Target, path: str) -> Any:
    response = read_response(await exchange(target, target.request("GET", path), PROBE_TIMEOUT_S))
    if response.status != 200:
        raise ConnectionError(f"GET {path}: HTTP {response.status}")
    return response.json()


async def _server_version(target: Target) -> str | None:
    """Where the server tells it (vLLM does); most do not."""
    try:
        return str((await _get(target, "/version"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _git(*arguments: str) -> str | None:
    try:
        root = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def host_facts() -> dict[str, Any]:
    try:
        version: str | None = metadata.version("twostroke")
    except metadata.PackageNotFoundError:
        version = None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "modified": None if changes is None else bool(changes),
        "twostroke": version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _tokenizer(directory: Path | None) -> tuple[Encode | None, int | None]:
    """The encoder, and the size of the vocabulary without what was added to it."""
    if directory is None:
        return None, None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    return lambda text: list(tokenizer.encode(text).ids), min(
        size, min((i for i in added if i >= FIRST_ID), default=size)
    )


def build_asks(options: argparse.Namespace) -> tuple[list[Ask], list[Ask]]:
    """Warm-up (random prompts that no measured request shares) and measured. Raises ValueError and OSError."""
    encode, known_size = _tokenizer(options.tokenizer)
    vocab_size = options.vocab_size or known_size or 40000
    if vocab_size <= FIRST_ID:
        raise ValueError(f"the vocabulary must reach past id {FIRST_ID}")
    seed, number = str(options.seed), options.num_requests
    clip = Clip(options.max_input_len, options.max_output_len)
    warmup = synthetic(f"{seed}/warm-up", options.warmup, options.input_len, options.output_len, vocab_size)
    kind, _, path = (options.dataset or "").partition(":")
    if not kind:
        asks = synthetic(seed, number, options.input_len, options.output_len, vocab_size)
    elif kind == "mooncake" and path:
        scale = None if options.rate or options.time_scale == 0 else options.time_scale
        asks = mooncake(Path(path), seed, number, vocab_size, clip, scale)
    elif kind == "sharegpt" and path:
        asks = sharegpt(Path(path), seed, number, options.output_len, clip, encode)
    else:
        raise ValueError("--dataset is mooncake:PATH or sharegpt:PATH")
    if not asks:
        raise ValueError("the dataset has no requests")
    return warmup, with_poisson_arrivals(asks, seed, options.rate) if options.rate else asks


async def measure(options: argparse.Namespace) -> Report:
    """Raises ValueError, OSError (TimeoutError too) when the run could not start: then nothing was measured."""
    warmup, asks = build_asks(options)
    target = Target.parse(options.url)
    model = options.model or str((await _get(target, "/v1/models"))["data"][0]["id"])
    facts = host_facts() | {"server_version": await _server_version(target)}
    warm, _, _ = await run_load(Load.prepare(target, warmup, model, options.concurrency, options.timeout))
    if errors := {answer.error for answer in warm if answer.error is not None}:
        raise ConnectionError(f"warm-up failed: {', '.join(sorted(errors))}")
    load = Load.prepare(target, asks, model, options.concurrency, options.timeout)
    answers, cpu_share, lag_s = await run_load(load)
    configuration = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    summary = summarize(answers, Slo(options.slo_ttft, options.slo_itl))
    return Report(options.label or options.url, model, summary, cpu_share, lag_s * 1e3, configuration, facts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_report(report: Report, console: Console) -> None:
    summary = report.summary
    table = Table("ms", "mean", "p50", "p90", "p99", "samples", title=f"{report.label}: {report.model}")
    spreads: dict[str, Spread] = {
        "TTFT": summary.ttft_ms,
        "ITL": summary.itl_ms,
        "TPOT": summary.tpot_ms,
        "E2E": summary.e2e_ms,
    }
    for name, spread in spreads.items():
        figures = (spread.mean, spread.p50, spread.p90, spread.p99)
        table.add_row(name, *(_number(figure) for figure in figures), str(spread.samples))
    console.print(table)
    console.print(
        f"{summary.requests} requests in {summary.duration_s:.2f} s: {summary.request_rate:.2f} requests/s, "
        f"{summary.output_token_rate:.1f} output tokens/s ({summary.output_tokens} tokens in {summary.chunks} chunks)"
    )
    share = "-" if summary.good_share is None else f"{summary.good_share:.1%}"
    console.print(f"goodput: {share} of requests, {summary.good_rate:.2f} requests/s")
    console.print(f"client: {report.client_cpu_share:.1%} of a core, at most {report.max_start_lag_ms:.1f} ms late")
    if summary.short_answers:
        console.print(f"{summary.short_answers} answers differ in length from what was asked")
    if summary.without_usage:
        console.print(f"{summary.without_usage} answers told no usage: chunks counted as tokens")
    for error, number in summary.errors.items():
        console.print(f"failed: {number} x {error}", markup=False)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _count_or_zero(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is negative or not finite")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    add("--model", help="default: the first of /v1/models")
    add("--concurrency", type=_count, default=8, help="users of the closed loop")
    add("--rate", type=_positive, help="requests/s with Poisson arrivals, instead of the closed loop")
    add("--num-requests", type=_count, default=64)
    add("--warmup", type=_count_or_zero, default=8, help="requests before the measured ones")
    add("--input-len", type=_count, default=256, help="tokens")
    add("--output-len", type=_count, default=64, help="tokens")
    add("--dataset", help="mooncake:PATH or sharegpt:PATH, instead of random prompts")
    add("--max-input-len", type=_count, help="clips a dataset's prompts, in tokens")
    add("--max-output-len", type=_count, help="clips a dataset's answers, in tokens")
    add("--time-scale", type=_not_negative, default=1.0, help="multiplies a trace's times; 0: closed loop")
    add("--tokenizer", type=Path, help="directory with tokenizer.json")
    add("--vocab-size", type=_count, help=f"random ids lie in [{FIRST_ID}, this); default: the tokenizer's, or 40000")
    add("--seed", type=int, default=0)
    add("--slo-ttft", type=_positive, metavar="MS")
    add("--slo-itl", type=_positive, metavar="MS", help="of a request's mean")
    add("--timeout", type=_positive, default=300.0, metavar="S", help="for one request")
    add("--json", type=Path, metavar="OUT")
    add("--label", help="default: the URL")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        report = asyncio.run(measure(options))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        print(f"nothing measured: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print_report(report, Console())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 1 if report.summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
