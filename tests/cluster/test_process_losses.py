"""Real processes killed and stopped under load: every request ends right or with a clear error, and nothing stays.

That a fault hits something is never assumed: the worker's load report says that jobs run on it in the very turn of
the loop that sends the signal, and afterwards the router has counted continuations for that reason.
"""

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx

from tests.process_cluster import ProcessCluster, expected, process_cluster
from tests.waiting import on_this_machine
from twostroke.cluster.core.messages import LoadReport
from twostroke.router.tokenizer import ByteTokenizer

NUM_VISITORS = 200
SHARED = [position % 250 for position in range(400)]
CLEAR = {"peer_lost", "transfer_failed", "overloaded"}
"""How a request may fail that lost its workers too often."""


@dataclass
class Visitor:
    """One client with its own idea of what to ask, how, and how long to stay."""

    number: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    left: bool = False
    error: str = ""
    told: str = ""
    """What the error said."""

    def __post_init__(self) -> None:
        random = Random(self.number)
        shared = SHARED[: random.choice((0, 40, 400))]
        self.prompt = [*shared, *(random.randrange(256) for _ in range(random.randint(1, 400)))]
        self.max_tokens = random.choice((random.randint(1, 2), random.randint(3, 40), random.randint(40, 150)))
        self.sampling: dict[str, Any] = random.choice(
            ({"temperature": 0.0}, {"temperature": 0.8, "seed": random.randrange(1000)})
        )
        self.leave_after = random.randint(0, 20) if random.random() < 0.2 else None
        self.face = random.choice((self._grpc, self._grpc, self._http_stream, self._http))

    @property
    def name(self) -> str:
        return f"visitor-{self.number}"

    async def visit(self, cluster: ProcessCluster) -> None:
        """Until the answer, the error, or the visitor's own departure."""
        await self.face(cluster)
        assert self.finished or self.left or self.error, f"{self.name} was left without a word"

    async def _grpc(self, cluster: ProcessCluster) -> None:
        answer = await cluster.ask(
            self.prompt,
            self.max_tokens,
            leave_after=self.leave_after,
            timeout_s=300,
            request_id=self.name,
            **self.sampling,
        )
        self.tokens, self.finished = answer.tokens, answer.finished is not None
        self.error, self.told = answer.reason, answer.message
        self.left = not self.finished and answer.error is None

    async def _http(self, cluster: ProcessCluster) -> None:
        if self.leave_after is not None:
            await self._http_stream(cluster)
            return
        answer = await cluster.http.post("/v1/completions", json=self._body(), headers={"x-request-id": self.name})
        self._take(answer.json())

    async def _http_stream(self, cluster: ProcessCluster) -> None:
        body, named = {**self._body(), "stream": True}, {"x-request-id": self.name}
        num_events = 0
        async with cluster.http.stream("POST", "/v1/completions", json=body, headers=named) as answer:
            if self.leave_after == 0:
                self.left = True
                return
            if answer.status_code != 200:
                self._take(json.loads(await answer.aread()))
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))
                    num_events += 1
                if self.leave_after is not None and num_events >= self.leave_after:
                    self.left = not self.finished
                    return

    def _body(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            **self.sampling,
        }

    def _take(self, body: dict[str, Any]) -> None:
        if "error" in body:
            self.error, self.told = body["error"]["code"], body["error"]["message"]
            return
        for choice in body["choices"]:
            self.text += choice["text"]
            self.finished = self.finished or choice["finish_reason"] is not None

    def check(self) -> None:
        """What came is a beginning of the right answer, and all of it when it was finished; or the error is clear."""
        assert not self.error or self.error in CLEAR, self
        right = expected(self.prompt, self.max_tokens, **self.sampling)
        if self.face == self._grpc:
            assert self.tokens == right if self.finished else self.tokens == right[: len(self.tokens)], self
            return
        decoder = ByteTokenizer().text_decoders(())
        text = "".join(decoder.push(token).text for token in right) + decoder.finish()
        assert self.text == text if self.finished else text.startswith(self.text), self


def at_work(load: LoadReport) -> bool:
    """More than the step under way ends: several answers, or prompts for two steps and more."""
    return load.ledger.active > 0 and (load.running >= 3 or (load.running > 0 and load.queued_tokens > 128))


async def strike(cluster: ProcessCluster, names: Sequence[str], number: signal.Signals) -> None:
    """Signal each worker while jobs run on it, and see that the router gives it up and continues what it had there.
    Which of two workers that are lost at once it counts as the cause is chance.
    """

    async def at_its_work(name: str) -> None:
        async with cluster.watching(name) as watch:
            await watch.until(at_work)
            cluster.signal(name, number)

    before = await cluster.metric("continuations_total")
    await asyncio.gather(*(at_its_work(name) for name in names))
    await cluster.until_workers(1, 1)
    await cluster.until_metric("continuations_total", before + 1)


async def test_every_request_survives_kills_stops_and_disconnects(tmp_path: Path) -> None:
    sections = {
        "model": {"fake_step_ms": 40},
        "pages": {"num_pages": 4096},
        "prefill": {"chunk_tokens": 64},  # 1600 tokens a second: prompts for 15 s, so that every fault finds some
        "router": {"max_queued": NUM_VISITORS},
    }
    async with process_cluster(tmp_path, 2, 2, **sections) as cluster:
        visitors = [Visitor(number) for number in range(NUM_VISITORS)]
        visits = [asyncio.create_task(visitor.visit(cluster)) for visitor in visitors]

        killed, stopped = ("prefill-0", "decode-0"), ("prefill-1", "decode-1")
        lives = {cluster.incarnation(name) for name in killed}
        await strike(cluster, killed, signal.SIGKILL)
        await asyncio.gather(*(cluster.start(name) for name in killed))
        assert not lives & {cluster.incarnation(name) for name in killed}
        await cluster.until_workers(2, 2)
        await strike(cluster, stopped, signal.SIGSTOP)
        for name in stopped:
            cluster.signal(name, signal.SIGCONT)

        async with asyncio.timeout(60):
            await asyncio.gather(*visits)
        await cluster.until_workers(2, 2)
        await cluster.at_rest()
        for visitor in visitors:
            visitor.check()

        survivors = {visitor.name for visitor in visitors if visitor.finished}
        failed = [visitor for visitor in visitors if visitor.error]
        assert len(survivors) + len(failed) + sum(visitor.left for visitor in visitors) == NUM_VISITORS
        assert len(survivors) >= 0.7 * NUM_VISITORS
        assert len(failed) <= 0.05 * NUM_VISITORS, failed
        lines = [line for line in cluster.request_lines() if line.get("client_request_id", "").startswith("visitor-")]
        assert len({line["client_request_id"] for line in lines}) == len(lines)
        continued = {line["client_request_id"] for line in lines if line.get("attempts", 1) > 1}
        assert continued & survivors
        print([(visitor.name, visitor.error, visitor.told) for visitor in failed])
        print(f"{len(survivors)} whole, {len(failed)} failed, {len(continued & survivors)} of them continued")


async def test_a_killed_router_is_told_at_once_and_its_next_life_serves(tmp_path: Path) -> None:
    async with process_cluster(tmp_path, model={"fake_step_ms": 5}) as cluster:
        streams = [asyncio.create_task(cluster.ask([n, *SHARED[:90]], 2000)) for n in range(20)]
        body = {"model": "fake", "prompt": SHARED, "max_tokens": 2000, "ignore_eos": True}
        whole = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        async with cluster.watching("decode-0") as watch:
            await watch.until(lambda load: load.running == 21)
            cluster.kill("router")
            killed_at = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*streams)
            assert asyncio.get_running_loop().time() - killed_at < on_this_machine(3.0)
            for n, answer in enumerate(answers):
                assert answer.error is grpc.StatusCode.UNAVAILABLE
                assert answer.tokens == expected([n, *SHARED[:90]], 2000)[: len(answer.tokens)]
            results = await asyncio.gather(whole, return_exceptions=True)
            assert isinstance(results[0], httpx.TransportError)
        await cluster.at_rest(timeout_s=5.0)  # the workers freed everything, with no router there to tell them

        await cluster.start("router")
        await cluster.until_workers(1, 1)
        assert (await cluster.ask(SHARED, 30)).tokens == expected(SHARED, 30)
        await cluster.at_rest()
