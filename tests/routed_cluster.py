"""The harness's fake workers behind a real dispatcher: whole requests in one process.

    async with routed_cluster(Shape(prefill=2, decode=2)) as routed:
        answer = await routed.ask(prompt, max_tokens=20)
        assert answer.tokens[0] == routed.golden(prompt, 20)

Leaving the context checks that the router holds nothing, then that no worker does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from tests.cluster_harness import FakeCluster, MakeExecutor, Node, Shape, fake_cluster
from tests.waiting import until
from twostroke.cluster.config import PolicySection, RouterSection
from twostroke.cluster.core.ids import Incarnation, RequestId, new_incarnation, new_request_id
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.request import Phase
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.transport.base import OnAccepted, Shipment, TransferStats, Transport, unheard
from twostroke.engine.fake_executor import golden
from twostroke.engine.vocabulary import Vocabulary
from twostroke.router.dispatcher import Dispatcher
from twostroke.router.request import (
    ChoiceEnd,
    Delta,
    GenerateRequest,
    PromptScores,
    RequestReport,
    RequestStream,
    TextDecoderFactory,
    TextStep,
)

ANSWER_TIMEOUT_S = 20.0


class NumberText:
    """A TextDecoder whose text is the tokens' numbers, `12,7,`; it holds back what may begin a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, token: int) -> TextStep:
        self._held += f"{token},"
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, stop = min(found)
            return TextStep(self._held[:at], True, stop)
        lengths = range(max(map(len, self._stop), default=0), 0, -1)
        keep = next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stop)), 0)
        sure = len(self._held) - keep if keep <= len(self._held) else 0
        text, self._held = self._held[:sure], self._held[sure:]
        return TextStep(text, False)

    def skip(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        return self._held


@dataclass
class Answer:
    text: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt: list[TokenLogprob] | None = None
    report: RequestReport | None = None

    @property
    def usage(self) -> RequestReport:
        assert self.report is not None
        return self.report

    def reasons(self) -> list[FinishReason]:
        return [self.ends[choice].finish_reason for choice in sorted(self.ends)]


async def read(stream: RequestStream, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """All of a stream; checks that nothing follows a choice's end, nor the report."""
    answer = Answer()
    async with asyncio.timeout(timeout_s):
        async for item in stream:
            assert answer.report is None
            if isinstance(item, Delta):
                assert item.choice not in answer.ends
                answer.text[item.choice] = answer.text.get(item.choice, "") + item.text
                answer.tokens.setdefault(item.choice, []).extend(item.token_ids)
                answer.logprobs.setdefault(item.choice, []).extend(item.logprobs)
            elif isinstance(item, PromptScores):
                assert answer.prompt is None
                assert not answer.tokens, "the prompt's log-probabilities come first"
                answer.prompt = list(item.logprobs)
            elif isinstance(item, ChoiceEnd):
                assert item.choice not in answer.ends
                answer.ends[item.choice] = item
            else:
                answer.report = item
    assert answer.report is not None
    return answer


class Gate:
    """Holds every commit back until opened, or fails it: `wrap` of the harness."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._open = asyncio.Event()
        self.error: Exception | None = None
        if is_open:
            self._open.set()

    def open(self, error: Exception | None = None) -> None:
        self.error = error
        self._open.set()

    def wrap(self, transport: Transport) -> Transport:
        return _GatedTransport(transport, self)

    async def passed(self) -> None:
        await self._open.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class _GatedTransport:
    def __init__(self, inner: Transport, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    @property
    def name(self) -> str:
        return self._inner.name

    async def open(self, lease: Any, on_accepted: OnAccepted = unheard) -> Shipment:
        return _GatedShipment(await self._inner.open(lease, on_accepted), self._gate)

    async def close(self) -> None:
        await self._inner.close()


class _GatedShipment:
    def __init__(self, inner: Shipment, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    async def push(self, first: int, pages: Sequence[Any]) -> None:
        await self._inner.push(first, pages)

    async def commit(
        self, first_token: int, first_token_index: int, first_logprob: TokenLogprob | None = None
    ) -> TransferStats:
        await self._gate.passed()
        return await self._inner.commit(first_token, first_token_index, first_logprob)

    async def abort(self, reason: str) -> None:
        await self._inner.abort(reason)


class RoutedCluster:
    """Made by `routed_cluster`."""

    def __init__(self, cluster: FakeCluster, dispatcher: Dispatcher, registry: CollectorRegistry) -> None:
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.registry = registry
        self.router: Incarnation = new_incarnation()

    async def attach(self, *nodes: Node) -> None:
        """Attach and wait for their first load report."""
        for node in nodes:
            link = await self.cluster.connect(node, self.router, self.dispatcher)
            assert self.dispatcher.attach(link)
        await until(lambda: all(self._known(node) for node in nodes))

    def _known(self, node: Node) -> bool:
        worker = self.dispatcher.fleet.find(node.info.incarnation)
        return worker is not None and worker.load is not None

    def request(self, prompt: Sequence[int], max_tokens: int = 20, **changes: Any) -> GenerateRequest:
        """`sampling` changes by its own names; everything else is the request's."""
        own = {name: changes.pop(name) for name in list(changes) if name in GenerateRequest.__dataclass_fields__}
        sampling = SamplingParams(max_tokens=max_tokens, **changes)
        return GenerateRequest(
            **{
                "request_id": new_request_id(),
                "model": "fake",
                "prompt": tuple(prompt),
                "sampling": sampling,
                "time_left_s": 15.0,
                **own,
            }
        )

    async def ask(self, prompt: Sequence[int], max_tokens: int = 20, **changes: Any) -> Answer:
        return await read(self.dispatcher.submit(self.request(prompt, max_tokens, **changes)))

    def golden(self, prompt: Sequence[int], max_tokens: int = 20, **sampling: Any) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        return golden(prompt, max_tokens, self.cluster.shape.vocab_size, params)

    def phase(self, request_id: RequestId, choice: int = 0) -> Phase | None:
        phases = self.dispatcher.phases().get(request_id)
        return None if phases is None else phases[choice]

    async def reach(self, request_id: RequestId, phase: Phase, tokens: Callable[[], bool] = lambda: True) -> None:
        """Turn the loop until choice 0 is in `phase`. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while self.phase(request_id) is not phase or not tokens():  # noqa: ASYNC110 - no turn must be missed
                await asyncio.sleep(0)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all samples with these labels."""
        return sum(
            sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == f"twostroke_{name}" and labels.items() <= sample.labels.items()
        )


DEFAULT_SHAPE = Shape()


@asynccontextmanager
async def routed_cluster(
    shape: Shape = DEFAULT_SHAPE,
    *,
    gate: Gate | None = None,
    make_executor: MakeExecutor | None = None,
    vocabulary: Vocabulary | None = None,
    decoders: TextDecoderFactory = NumberText,
    policy: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[RoutedCluster]:
    """`policy` and `config` change PolicySection (local prefill is off unless asked for) and RouterSection; `decoders`
    make the text of answers.
    """
    placing = PolicySection(**{"local_threshold_tokens": 0, **(policy or {})})
    async with fake_cluster(
        shape, gate.wrap if gate else lambda transport: transport, make_executor, vocabulary
    ) as cluster:
        registry = CollectorRegistry()
        dispatcher = Dispatcher(
            RouterSection(**{"policy": placing, **config}),
            decoders,
            RouterMetrics(registry, "fake"),
            random=Random(1),
        )
        routed = RoutedCluster(cluster, dispatcher, registry)
        await routed.attach(*cluster.nodes)
        yield routed
        assert await dispatcher.drain(5.0), dispatcher.phases()
        dispatcher.check_integrity()
        if gate is not None:
            gate.open()
        # Everything that workers held for ended requests is free, before the links are closed.
        await cluster.rest()
        assert all(not worker.charges for worker in dispatcher.fleet.workers())
        assert routed.metric("requests_accepted_total") == routed.metric("requests_total")
        await dispatcher.close()
