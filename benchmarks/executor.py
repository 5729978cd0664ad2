"""What a model executor does alone, without scheduler, transport or server: for choices that an ADR records.

    python -m benchmarks.executor --threads 1 2 --chunk 64 256 512 --rows 1 8 --context 128 512 [--json FILE]

    prefill   a prompt of `--prompt` tokens in chunks of each size: tokens a second over the whole prompt
    decode    a step of each number of rows, each with a context of each length: milliseconds

Pages lie scattered in a pool filled with noise, as in a pool that is in use: untouched memory would be read from one
page of the cache. Cases are measured in turns, so that a slow minute of the machine hits all of them; a figure is the
median of `--repeats`, beside the best. `load` is the machine's load average: over the threads used, somebody else
was there, and only ratios within the table mean anything.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from twostroke.cluster.core.ids import JobId, PageId, RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.model.load import load_executor
from twostroke.engine.model.source import default_cache_dir, resolve
from twostroke.engine.plan import Plan, SampleInput
from twostroke.engine.torch_executor import TorchExecutor

GREEDY = SamplingParams(max_tokens=1 << 20)
SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    linear: str
    threads: int
    stroke: str
    """prefill or decode."""
    size: int
    """Tokens of a chunk, or rows."""
    context: int
    """Tokens of the prompt, or of each row's context."""
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    linear: str
    threads: int
    stroke: str
    size: int
    context: int
    median_ms: float
    """Of the whole prompt, or of a step."""
    best_ms: float
    tokens_per_s: float
    """By the median."""


def prefill_plan(tokens: Sequence[int], start: int, end: int, pages: Sequence[PageId], page_size: int) -> Plan:
    sample = SampleInput(GREEDY, tokens, []) if end == len(tokens) else None
    job = JobId(RequestId("prefill"), 0, 0)
    return Plan([job], [start], [end - start], list(tokens[start:end]), [pages[: -(-end // page_size)]], [sample])


def decode_plan(rows: int, context: int, pages: Sequence[PageId], page_size: int) -> Plan:
    """`context` tokens a row, of which the newest is computed."""
    each = -(-context // page_size)
    return Plan(
        jobs=[JobId(RequestId(f"row-{row}"), 0, 0) for row in range(rows)],
        num_computed=[context - 1] * rows,
        num_new=[1] * rows,
        tokens=list(range(rows)),
        page_tables=[pages[row * each : (row + 1) * each] for row in range(rows)],
        sample=[SampleInput(GREEDY, (0,), []) for _ in range(rows)],
    )


def cases_of(executor: TorchExecutor, linear: str, threads: int, options: argparse.Namespace) -> list[Case]:
    page_size = executor.memory.layout.page_size
    numbers = random.Random(SEED)
    pages = [PageId(page) for page in numbers.sample(range(executor.memory.num_pages), executor.memory.num_pages)]
    prompt = [numbers.randrange(executor.vocab_size) for _ in range(options.prompt)]
    cases: list[Case] = []
    for chunk in options.chunk:
        starts = range(0, len(prompt), chunk)
        plans = [prefill_plan(prompt, at, min(at + chunk, len(prompt)), pages, page_size) for at in starts]
        cases.append(Case(linear, threads, "prefill", chunk, len(prompt), partial(run_all, executor, plans)))
    for context in options.context:
        for rows in options.rows:
            plans = [decode_plan(rows, context, pages, page_size)]
            cases.append(Case(linear, threads, "decode", rows, context, partial(run_all, executor, plans)))
    return cases


def run_all(executor: TorchExecutor, plans: Sequence[Plan]) -> None:
    for plan in plans:
        executor.launch(plan).result()


def measure(cases: Sequence[Case], repeats: int) -> list[Result]:
    """In turns, after a round that is not counted: it compiles kernels and touches memory."""
    times: list[list[float]] = [[] for _ in cases]
    for number in range(repeats + 1):
        for case, samples in zip(cases, times, strict=True):
            begun = time.perf_counter()
            case.run()
            if number:
                samples.append(1e3 * (time.perf_counter() - begun))
    return [_result(case, samples) for case, samples in zip(cases, times, strict=True)]


def _result(case: Case, samples: Sequence[float]) -> Result:
    median = statistics.median(samples)
    num_tokens = case.context if case.stroke == "prefill" else case.size
    return Result(
        case.linear,
        case.threads,
        case.stroke,
        case.size,
        case.context,
        round(median, 2),
        round(min(samples), 2),
        round(1e3 * num_tokens / median, 1),
    )


def pages_needed(options: argparse.Namespace) -> int:
    page_size: int = options.page_size
    longest: int = max(options.context)
    rows: int = max(options.rows)
    prompt: int = options.prompt
    return max(-(-prompt // page_size), rows * -(-longest // page_size))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a directory, a GGUF file or a hub id")
    parser.add_argument("--linear", nargs="+", default=["auto"], choices=["auto", "float32", "packed_fp16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--chunk", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args(arguments)
    for name in ("threads", "chunk", "rows", "context"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(options.prompt, options.page_size, options.repeats) < 1:
        parser.error("--prompt, --page-size and --repeats must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    directory = resolve(options.model, default_cache_dir(), lambda line: print(line, file=sys.stderr))
    cases: list[Case] = []
    for linear, threads in itertools.product(options.linear, options.threads):
        executor = load_executor(
            directory, page_size=options.page_size, num_pages=pages_needed(options), threads=threads, linear=linear
        )
        longest = max(options.prompt, *options.context)
        if longest > executor.max_positions:
            print(f"{longest} tokens are over the model's {executor.max_positions}", file=sys.stderr)
            return 2
        executor.pool.tensor.normal_()
        cases += cases_of(executor, linear, threads, options)
    before = os.getloadavg()[0]
    results = measure(cases, options.repeats)
    after = os.getloadavg()[0]
    print(f"{directory.name}, torch {torch.__version__}, {os.cpu_count()} cores, load {before:.1f} to {after:.1f}")
    print(
        f"{'linear':12} {'threads':>7} {'stroke':8} {'size':>5} {'context':>7} {'median':>9} {'best':>9} {'tok/s':>8}"
    )
    for row in results:
        print(
            f"{row.linear:12} {row.threads:>7} {row.stroke:8} {row.size:>5} {row.context:>7} "
            f"{row.median_ms:9.1f} {row.best_ms:9.1f} {row.tokens_per_s:5.0f}"
        )
    if options.json:
        facts = {"model": directory.name, "torch": torch.__version__, "cores": os.cpu_count(), "load": [before, after]}
        options.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in results]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
