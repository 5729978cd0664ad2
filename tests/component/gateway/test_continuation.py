"""Answers cut by an output budget and continued, over HTTP and gRPC: the parts join to the uncut answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.gateway_server import CHAT, COMPLETION, Gateway, events, gateway
from twostroke.cluster.config import BudgetSection, RouterSection, TenantBudget
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.router.continuation import ContinuationTokens
from twostroke.router.fake_generator import FakeGenerator
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.tokenizer import ByteTokenizer

TEXT = "né 日本 😀 abab."
NUM_TOKENS = len(TEXT.encode()) + 1
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETION: {"model": "fake", "prompt": "Once"},
}
KEY = "a key of these tests"


def sealer(key: str = KEY, ttl_s: float = 60.0) -> ContinuationTokens:
    return ContinuationTokens([key.encode()], ttl_s)


def budgeted(tokens: int = 5, **changes: Any) -> RouterSection:
    return RouterSection(budget=BudgetSection(output_tokens=tokens, key=KEY, **changes))


@dataclass
class Part:
    """What one answer said of one choice."""

    text: str = ""
    finish: str | None = None
    continuation: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    num_tokens: int = 0
    index: int = 0

    def take(self, choice: dict[str, Any]) -> None:
        said = choice.get("text")
        if said is None:
            said = (choice.get("message") or choice["delta"]).get("content") or ""
        self.text += said
        self.index = choice["index"]
        self.finish = choice["finish_reason"] or self.finish
        self.continuation = choice.get("continuation", self.continuation)
        for name, entries in (choice["logprobs"] or {}).items():
            self.logprobs[name] = self.logprobs.get(name, []) + (entries or [])


async def ask(server: Gateway, path: str, *, stream: bool = False, headers: Any = None, **body: Any) -> Part:
    """The one choice of the answer."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await server.client.post(path, json={**ASK[path], **body, **options}, headers=headers)
    assert answer.status_code == 200, answer.text
    part = Part()
    for chunk in events(answer.text)[:-1] if stream else [answer.json()]:
        for choice in chunk["choices"]:
            part.take(choice)
        if chunk.get("usage"):
            part.num_tokens = chunk["usage"]["completion_tokens"]
            assert chunk["usage"]["prompt_tokens"] == len(server.generator.submitted[-1].prompt)
    return part


async def in_parts(server: Gateway, path: str, **body: Any) -> list[Part]:
    parts = [await ask(server, path, **body)]
    while parts[-1].continuation is not None:
        parts.append(await ask(server, path, **body, continuation=parts[-1].continuation))
    return parts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stop", [None, "abab", "ba", "本 😀", " "])
async def test_parts_of_every_length_join(path: str, stop: str | None, stream: bool) -> None:
    budgets = range(1, NUM_TOKENS + 1)
    tenants = {str(budget): TenantBudget(output_tokens=budget) for budget in budgets}
    async with gateway(budgeted(0, tenant_header="x-tenant", tenants=tenants), answers=[TEXT]) as server:
        uncut = await ask(server, path, stop=stop)
        for budget in budgets:
            parts = await in_parts(server, path, stop=stop, stream=stream, headers={"x-tenant": str(budget)})
            assert "".join(part.text for part in parts) == uncut.text
            assert [part.finish for part in parts] == ["length"] * (len(parts) - 1) + ["stop"]
            assert sum(part.num_tokens for part in parts) == uncut.num_tokens
            assert all(part.num_tokens <= budget for part in parts)


@pytest.mark.parametrize("asked", [3, 7, None])
async def test_max_tokens_counts_the_whole_answer(asked: int | None) -> None:
    async with gateway(budgeted(3), answers=[TEXT]) as server:
        parts = await in_parts(server, COMPLETION, max_tokens=asked, ignore_eos=True) if asked else []
        default = await ask(server, COMPLETION)
    assert sum(part.num_tokens for part in parts) == (asked or 0)
    assert len(parts) == -(-(asked or 0) // 3)
    assert all(part.finish == "length" for part in parts)
    assert default.num_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (COMPLETION, {"logprobs": 1}),
        (COMPLETION, {"logprobs": 0, "echo": True}),
    ],
)
async def test_log_probabilities_and_echo_join(path: str, asked: dict[str, Any], stream: bool) -> None:
    async with gateway(answers=[TEXT]) as server:
        uncut = await ask(server, path, **asked)
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        parts = await in_parts(server, path, **asked, stream=stream)
    assert "".join(part.text for part in parts) == uncut.text
    for name, entries in uncut.logprobs.items():
        assert [entry for part in parts for entry in part.logprobs[name]] == entries


async def test_a_prompts_log_probabilities_are_told_once() -> None:
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        first = await server.post(COMPLETION, {**ASK[COMPLETION], "prompt_logprobs": 1})
        token = first.json()["choices"][0]["continuation"]
        second = await server.post(COMPLETION, {**ASK[COMPLETION], "prompt_logprobs": 1, "continuation": token})
        streamed = {**ASK[COMPLETION], "prompt_logprobs": 1, "stream": True}
        third = await server.post(COMPLETION, {**streamed, "continuation": token})
        assert (await server.post(COMPLETION, streamed)).json()["error"]["param"] == "prompt_logprobs"
    assert third.status_code == 200
    assert "prompt_logprobs" not in third.text
    assert first.json()["choices"][0]["prompt_logprobs"]
    assert "prompt_logprobs" not in second.json()["choices"][0]


async def test_each_choice_goes_on_alone_under_its_own_number() -> None:
    answers = ["first one", "2nd", "the third one"]
    async with gateway(budgeted(6), answers=answers) as server:
        body = {**ASK[COMPLETION], "n": 3}
        choices = (await server.post(COMPLETION, body)).json()["choices"]
        assert [("continuation" in choice, choice["finish_reason"]) for choice in choices] == [
            (True, "length"),
            (False, "stop"),
            (True, "length"),
        ]
        for choice in (choices[0], choices[2]):
            text, token = choice["text"], choice["continuation"]
            while token is not None:
                part = await ask(server, COMPLETION, n=3, continuation=token)
                assert part.index == choice["index"]
                text, token = text + part.text, part.continuation
            assert text == answers[choice["index"]]


async def test_of_several_prompts_one_goes_on_alone() -> None:
    async with gateway(budgeted(6), answers=["first one", "second one"]) as server:
        body = {**ASK[COMPLETION], "prompt": ["Once", "Twice"], "n": 2}
        choices = (await server.post(COMPLETION, body)).json()["choices"]
        token = choices[3]["continuation"]
        part = await ask(server, COMPLETION, prompt="Twice", n=2, continuation=token)
        assert (choices[3]["text"], part.text, part.index) == ("second", " one", 1)
        refusal = await server.post(COMPLETION, {**body, "continuation": token})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "prompt")


# --------------------------------------------------------------------------------------------- who has what


async def test_budgets_are_by_class_and_tenant() -> None:
    config = budgeted(
        9,
        tenant_header="x-tenant",
        classes={"batch": 4, "free": 0},
        tenants={
            "acme": TenantBudget(service_class="batch"),
            "bolt": TenantBudget(service_class="batch", output_tokens=6),
            "cube": TenantBudget(service_class="free"),
            "dune": TenantBudget(),
        },
    )
    async with gateway(config, answers=[TEXT]) as server:
        for tenant, expected in (("acme", 4), ("bolt", 6), ("cube", NUM_TOKENS), ("dune", 9), ("else", 9), (None, 9)):
            part = await ask(server, CHAT, headers={} if tenant is None else {"x-tenant": tenant})
            assert part.num_tokens == expected, tenant
            assert server.generator.submitted[-1].tenant == (tenant or "default")
        mine = await ask(server, CHAT, headers={"x-tenant": "acme"})
        body = {**ASK[CHAT], "continuation": mine.continuation}
        for tenant, status in (("bolt", 400), ("acme", 200)):
            answer = await server.client.post(CHAT, json=body, headers={"x-tenant": tenant})
            assert answer.status_code == status
        assert (await server.client.post(CHAT, json=ASK[CHAT], headers={"x-tenant": "a b"})).json()["error"] == {
            "message": "a tenant has 1 to 64 letters, digits and . _ -",
            "type": "invalid_request_error",
            "param": "x-tenant",
            "code": "invalid_request",
        }


async def test_a_tenant_is_not_the_clients_to_choose() -> None:
    config = budgeted(4, tenants={"rich": TenantBudget(output_tokens=0)})
    async with gateway(config, answers=[TEXT]) as server:
        assert (await ask(server, CHAT, headers={"x-tenant": "rich"})).num_tokens == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda token: "",
        lambda token: "!",
        lambda token: "é" * 8,
        lambda token: token[:-8],
        lambda token: token + "AAAA",
        lambda token: "B" + token[1:],
        lambda token: token[:40] + ("A" if token[40] != "A" else "B") + token[41:],
        lambda token: "A" * 100_000,
        lambda token: sealer(key="another").seal(sealer().open(token, 512)),
        lambda token: sealer(ttl_s=-5).seal(sealer().open(token, 512)),
    ],
)
async def test_a_bad_one_is_refused_by_name(make: Any) -> None:
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        token = (await ask(server, COMPLETION)).continuation
        for stream in (False, True):
            answer = await server.post(COMPLETION, {**ASK[COMPLETION], "continuation": make(token), "stream": stream})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continuation")


@pytest.mark.parametrize("value", [5, True, ["x"], {"a": 1}])
async def test_it_is_a_string(value: object) -> None:
    async with gateway() as server:
        answer = await server.post(COMPLETION, {**ASK[COMPLETION], "continuation": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continuation")


@pytest.mark.parametrize(
    "changes", [{"prompt": "Twice"}, {"temperature": 0.5}, {"stop": "x"}, {"max_tokens": 50}, {"seed": 1}]
)
async def test_another_request_is_refused_and_the_same_served(changes: dict[str, Any]) -> None:
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        token = (await ask(server, COMPLETION)).continuation
        answer = await server.post(COMPLETION, {**ASK[COMPLETION], **changes, "continuation": token})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continuation")
        again = await ask(server, COMPLETION, continuation=token, stream=True, timeout=5, priority=3, user="u", n=2)
        assert again.text


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_an_answer_that_is_taken_apart_neither_carries_one_nor_begins_anew_with_one(choice: str) -> None:
    tools = {"tools": [FUNCTION], "tool_choice": choice}
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        token = (await ask(server, CHAT)).continuation
        for stream in (False, True):
            refusal = await server.post(CHAT, {**ASK[CHAT], **tools, "stream": stream, "continuation": token})
            assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "continuation")
        assert (await ask(server, CHAT, **tools)).continuation is None
        assert (await ask(server, CHAT, tools=[FUNCTION], tool_choice="none", continuation=token)).text


async def test_objects_have_no_order() -> None:
    biases = [("1", 2.5), ("70", -3), ("2", 1)]
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        token = (await ask(server, COMPLETION, logit_bias=dict(biases))).continuation
        assert (await ask(server, COMPLETION, logit_bias=dict(reversed(biases)), continuation=token)).text
        for changed in ({}, dict(biases[1:]), {**dict(biases), "1": 2.4}):
            answer = await server.post(COMPLETION, {**ASK[COMPLETION], "logit_bias": changed, "continuation": token})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continuation")


@pytest.mark.parametrize("names", [("rich", "poor"), ("poor", "rich"), ("rich", "rich")])
async def test_two_tenants_are_none(names: tuple[str, str], servicer: InferenceServicer) -> None:
    """What a client sends beside the proxy's header must not be taken for it, wherever it stands."""
    config = budgeted(4, tenant_header="x-tenant", tenants={"rich": TenantBudget(output_tokens=0)})
    async with gateway(config, answers=[TEXT]) as server:
        headers = [("x-tenant", name) for name in names]
        answer = await server.client.post(CHAT, json=ASK[CHAT], headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-tenant")
    with pytest.raises(InvalidRequest, match="one tenant") as raised:
        servicer._tenant(Caller(*(("tenant", name) for name in names)))  # type: ignore[arg-type]
    assert raised.value.field == "tenant"


async def test_keys_change_without_an_answer_lost(tmp_path: Path) -> None:
    """New key on every router for opening, then for sealing, then alone."""
    new, key_file = "the key of tomorrow", tmp_path / "key"
    token: str | None = None
    for keys, good in (([KEY], True), ([KEY, new], True), ([new, KEY], True), ([new], True), ([KEY], False)):
        key_file.write_text("\n".join(keys) + "\n\n")
        for budget in ({"key": "\n".join(keys)}, {"key_file": str(key_file)}):
            config = RouterSection(budget=BudgetSection(output_tokens=4, **budget))
            async with gateway(config, answers=[TEXT]) as server:
                body = {**ASK[COMPLETION], "continuation": token}
                answer = await server.post(COMPLETION, body)
                assert answer.status_code == (200 if good else 400)
                if good:
                    token = (await ask(server, COMPLETION)).continuation


# --------------------------------------------------------------------------------------------------- gRPC


class Caller:
    """A context as `Generate` asks of it."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


@pytest.fixture
def servicer() -> InferenceServicer:
    tokenizer = ByteTokenizer()
    config = budgeted(4, tenant_header="tenant", tenants={"acme": TenantBudget(output_tokens=7)})
    generator = FakeGenerator(tokenizer, answers=[TEXT])
    return InferenceServicer(generator, tokenizer, config, RouterMetrics(CollectorRegistry(), "fake"))


async def call(servicer: InferenceServicer, caller: Caller, **changes: Any) -> tuple[str, pb.ChoiceEnd]:
    request = pb.GenerateRequest(**{"model": "fake", "text": "Once", "stop": ["b."], **changes})
    items = [item async for item in servicer.Generate(request, caller)]  # type: ignore[arg-type]
    text = "".join(item.delta.text for item in items if item.HasField("delta"))
    [end] = [item.choice_end for item in items if item.HasField("choice_end")]
    return text, end


@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_grpc_parts_join(servicer: InferenceServicer, tenant: str | None) -> None:
    caller = Caller(("tenant", tenant)) if tenant else Caller()
    text, end = await call(servicer, caller)
    assert end.completion_tokens == (7 if tenant else 4)
    while end.continuation:
        part, end = await call(servicer, caller, continuation=end.continuation)
        text += part
    assert text == TEXT[:-2]


async def test_what_http_gave_grpc_takes_and_back(servicer: InferenceServicer) -> None:
    async with gateway(budgeted(4), answers=[TEXT]) as server:
        first = await ask(server, COMPLETION, stop="b.")
        second, end = await call(servicer, Caller(), continuation=first.continuation)
        third = await ask(server, COMPLETION, stop=["b."], continuation=end.continuation)
    assert TEXT.startswith(first.text + second + third.text)
    assert third.text


async def test_grpc_refuses_by_name(servicer: InferenceServicer) -> None:
    with pytest.raises(Exception, match="not one of ours") as raised:
        await servicer._prepare(pb.GenerateRequest(model="fake", text="x", continuation="?"), None, "default")
    assert getattr(raised.value, "field", None) == "continuation"
