"""Load on any OpenAI-compatible server: latency percentiles, throughput, goodput.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --concurrency 8 --input-len 256 --output-len 64

Closed loop by default (`--concurrency` clients, each sends its next request when the last has ended); with `--rate`
Poisson arrivals, at most `--concurrency` under way. Streams `/v1/completions` with `ignore_eos`, so that every server
makes the same number of tokens. Exit code 1 when any request failed.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.stats import Answer, summarize
from benchmarks.workload import Item, load_items, random_items


class Client:
    """Sends items to one server. `started_s` is the zero of all times."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, timeout_s: float) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.started_s = time.perf_counter()

    async def ask(self, item: Item) -> Answer:
        """Never raises for a failed request; the answer says why it failed."""
        body = {
            "model": self._model,
            "prompt": item.prompt,
            "max_tokens": item.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.perf_counter() - self.started_s
        chunks: list[float] = []
        num_tokens = 0
        error = ""
        try:
            async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
                if response.status != 200:
                    detail = (await response.text())[:200]
                    return Answer(sent_s, (), 0, f"{response.status}: {detail}")
                async for line in response.content:
                    if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        error = str(event["error"].get("message", event["error"]))
                        break
                    if event.get("choices"):
                        chunks.append(time.perf_counter() - self.started_s)
                    if event.get("usage"):
                        num_tokens = event["usage"]["completion_tokens"]
        except (aiohttp.ClientError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Answer(sent_s, tuple(chunks), num_tokens or len(chunks), error)


async def run_load(
    client: Client, items: Sequence[Item], concurrency: int, rate: float | None, seed: int
) -> list[Answer]:
    """All items, at most `concurrency` at a time."""
    slots = asyncio.Semaphore(concurrency)
    random = Random(seed)

    async def one(item: Item) -> Answer:
        try:
            return await client.ask(item)
        finally:
            slots.release()

    tasks = []
    due_s = 0.0
    for item in items:
        if item.at_s is not None:
            due_s = item.at_s
        elif rate is not None:
            due_s += random.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - client.started_s)))
        await slots.acquire()
        tasks.append(asyncio.create_task(one(item)))
    return await asyncio.gather(*tasks)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One run: warm-up, then the measured requests. Raises aiohttp.ClientError when the server is not there."""
    if options.dataset:
        count = options.num_requests
        items = load_items(
            options.dataset, count, options.vocab_size, options.input_len, options.output_len, options.time_scale
        )
    else:
        items = random_items(
            options.num_requests, options.input_len, options.output_len, options.vocab_size, options.seed
        )
    warmup = random_items(
        options.warmup, options.input_len, options.output_len, options.vocab_size, options.seed + 1_000_003
    )
    connector = aiohttp.TCPConnector(limit=options.concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:
        model = options.model or await first_model(session, options.url)
        client = Client(session, options.url, model, options.timeout)
        await run_load(client, warmup, options.concurrency, None, options.seed)
        client.started_s = time.perf_counter()
        answers = await run_load(client, items, options.concurrency, options.rate, options.seed)
        duration_s = time.perf_counter() - client.started_s
    summary = summarize(answers, duration_s, options.slo_ttft, options.slo_itl)
    facts = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    return {"label": options.label, "options": vars(options), "model": model, "host": facts, **summary}


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def show(summary: dict[str, Any]) -> None:
    table = Table(title=summary["label"] or summary["options"]["url"], title_justify="left")
    table.add_column("ms")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        spread = summary[name]
        table.add_row(name[:-3].upper(), *(f"{spread[column]:.1f}" for column in ("mean", "p50", "p90", "p99")))
    console = Console()
    console.print(table)
    console.print(
        f"{summary['requests']} requests in {summary['duration_s']:.1f} s: "
        f"{summary['output_throughput']:.1f} tokens/s, "
        f"{summary['request_throughput']:.2f} requests/s, goodput {summary['goodput']:.2f} requests/s "
        f"({100 * summary['goodput_share']:.0f} %)"
    )
    if summary["errors"]:
        console.print(f"[red]errors: {summary['errors']}[/red]")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options that `serve` and `compare` share."""
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=256, help="tokens; with a data set, the longest prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens; with a data set, the longest answer")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests a second, Poisson; default: closed loop")
    parser.add_argument("--dataset", default="", help="mooncake:PATH or sharegpt:PATH; default: random ids")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretch of a trace's time stamps")
    parser.add_argument("--vocab-size", type=int, default=40_000, help="random ids stay below it")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--slo-ttft", type=float, help="ms")
    parser.add_argument("--slo-itl", type=float, help="ms, of a request's mean")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--label", default="")
    add_load_options(parser)
    options = parser.parse_args()
    summary = asyncio.run(measure(options))
    show(summary)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    sys.exit(1 if summary["errors"] else 0)


if __name__ == "__main__":
    main()
