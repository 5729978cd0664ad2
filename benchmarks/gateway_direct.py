"""The first token without a router, for `benchmarks.gateway`: a bare client in a process of its own, on the router's
core, asks the same workers over the same attached streams.

    tokenize -> reserve -> Leased -> prefill -> the first token

These two round trips are what an answer by two workers costs without any router. The client says no more than it must,
and the clock starts when it has tokenized: as in the router, the workers have then slept for as long as that took, and
are slower to wake.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.gateway_process import make_tokenizer
from benchmarks.texts import texts
from twostroke.cluster import attach
from twostroke.cluster.core.ids import JobId, RequestId, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import Ended, Lease, Leased, Role, Stroke, Submit, Tokens, WorkerMessage
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.cluster.telemetry.logs import configure_logging

START_TIMEOUT_S = 30.0
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Asking:
    """What the process is told. `core` None: not pinned."""

    workers: tuple[str, ...]
    core: int | None
    tokenizer: Path | None
    sizes: tuple[int, ...]
    """Prompts, in tokens."""
    seconds: float
    """For each of them."""


async def measure(asking: Asking) -> dict[int, float]:
    """Of each size the median, in milliseconds. Raises TimeoutError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(target=run, args=(asking, theirs), daemon=True)
    client.start()
    try:
        if not await asyncio.to_thread(ours.poll, START_TIMEOUT_S + len(asking.sizes) * asking.seconds):
            raise TimeoutError("the client without a router does not end")
        return dict(ours.recv())
    finally:
        await asyncio.to_thread(client.join, TIMEOUT_S)
        if client.is_alive():
            client.terminate()


def run(asking: Asking, pipe: Connection) -> None:
    """In the process: measure, and send what `measure` answers."""
    if asking.core is not None:
        os.sched_setaffinity(0, {asking.core})
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        configure_logging("warning", "json", "direct", nowhere)
        pipe.send(asyncio.run(_ask(asking)))


async def _ask(asking: Asking) -> dict[int, float]:
    client = _Client(asking.tokenizer)
    links = [await attach.connect(address, new_incarnation(), client) for address in asking.workers]
    by_role = {link.info.role: link for link in links}
    try:
        return {size: await client.median_ms(by_role, size, asking.seconds) for size in asking.sizes}
    finally:
        for link in links:
            link.close("measured")
            await link.wait_closed()


class _Client:
    """A `LinkListener`; one job at a time."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._tokenizer = make_tokenizer(tokenizer)
        self._words = tokenizer is not None
        self._leased: asyncio.Future[Lease] | None = None
        self._first: asyncio.Future[None] | None = None
        self._over: asyncio.Future[None] | None = None

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            if isinstance(message, Leased) and self._leased is not None:
                self._leased.set_result(message.lease)
            elif isinstance(message, Tokens) and self._first is not None and not self._first.done():
                self._first.set_result(None)
            elif isinstance(message, Ended) and link.info.role is Role.DECODE and self._over is not None:
                self._over.set_result(None)

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        """What waits for it runs out of time."""

    async def median_ms(self, links: Mapping[Role, WorkerLink], size: int, seconds: float) -> float:
        """Raises TimeoutError when a worker does not answer."""
        taken: list[float] = []
        ends_at = time.perf_counter() + seconds
        for text in cycle(texts(size, words=self._words)):
            if taken and time.perf_counter() > ends_at:
                break
            prompt = tuple(self._tokenizer.encode(text))
            async with asyncio.timeout(TIMEOUT_S):
                taken.append(await self._first_s(links, prompt, len(taken)))
        return 1000 * statistics.median(taken)

    async def _first_s(self, links: Mapping[Role, WorkerLink], prompt: tuple[int, ...], number: int) -> float:
        loop = asyncio.get_running_loop()
        self._leased, self._first, self._over = loop.create_future(), loop.create_future(), loop.create_future()
        job = JobId(RequestId(f"direct-{len(prompt)}-{number}"), 0, 1)
        sampling = SamplingParams(max_tokens=2, seed=number, ignore_eos=True)
        began = time.perf_counter()
        links[Role.DECODE].send([Submit(job, Stroke.RESERVE, prompt, (), sampling, TIMEOUT_S)])
        lease = await self._leased
        links[Role.PREFILL].send([Submit(job, Stroke.PREFILL, prompt, (), sampling, TIMEOUT_S, lease=lease)])
        await self._first
        taken = time.perf_counter() - began
        await self._over
        return taken
