"""Our clients against real servers: what comes back, retries, cancelling, deadlines; the same over both wires."""

import socket
from dataclasses import replace

import pytest

from tests.client_servers import WIRES, Waits, client_of, grpc_api, served
from tests.waiting import until
from twostroke.client.calls import AnswerStream
from twostroke.client.grpc import GrpcClient
from twostroke.client.retry import NEVER, RetryPolicy
from twostroke.client.types import Message, Prompt, Sampling, Tool, Tools
from twostroke.cluster.config import BudgetSection, RouterSection
from twostroke.cluster.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerLost,
    TwostrokeError,
    Unavailable,
    UnknownModel,
)
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.core.messages import Ledger, LoadReport, Role
from twostroke.router.fake_generator import FAKE_MODEL
from twostroke.router.request import WorkerLoad
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle

ANSWER = "Hello, wörld!\u2028🙂"
"""With a line separator, which is no end of an event."""


async def read_into(texts: list[str], stream: AnswerStream) -> None:
    async for piece in stream:
        texts.append(piece.text)


wires = pytest.mark.parametrize("wire", WIRES)


@wires
async def test_an_answer_that_a_budget_ended_goes_on(wire: str) -> None:
    config = RouterSection(budget=BudgetSection(output_tokens=6))
    async with served(wire, config=config, answers=[ANSWER]) as (_, client):
        answer = await client.generate("Hi", Sampling(temperature=0.7))
        text = answer.text
        while answer.continuation:
            assert (answer.finish_reason, answer.usage.completion_tokens) == ("length", 6)
            answer = await client.generate("Hi", Sampling(temperature=0.7), continuation=answer.continuation)
            text += answer.text
        assert text == ANSWER
        with pytest.raises(InvalidRequest) as raised:
            await client.generate("Hi", continuation="x")
    assert raised.value.field == "continuation"


@wires
@pytest.mark.parametrize(
    "prompt", ["Hi", [72, 105], [Message("system", "Be brief."), Message("user", "Hi")]], ids=["text", "ids", "chat"]
)
async def test_an_answer_streamed_and_whole(wire: str, prompt: Prompt) -> None:
    async with served(wire, answers=[ANSWER]) as (generator, client):
        async with client.stream(prompt, Sampling(max_tokens=100, seed=7)) as stream:
            pieces = [piece async for piece in stream]
            streamed = stream.answer
        whole = await client.generate(prompt, Sampling(max_tokens=100, seed=7))
        first, second = generator.submitted
    assert "".join(piece.text for piece in pieces) == streamed.text == whole.text == ANSWER
    assert whole.finish_reason == "stop"
    assert whole.usage.prompt_tokens == len(second.prompt)
    assert whole.usage.completion_tokens == len(ANSWER.encode()) + 1
    assert first.prompt == second.prompt
    assert (first.sampling.seed, first.sampling.max_tokens) == (7, 100)
    assert (streamed.request_id, whole.request_id) == (first.request_id, second.request_id)
    if wire == "grpc":
        assert bytes(whole.token_ids[:-1]) == ANSWER.encode()


@wires
async def test_every_parameter_arrives(wire: str) -> None:
    sampling = Sampling(
        max_tokens=9,
        min_tokens=0,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=0,
        presence_penalty=0.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        stop=("xx",),
        stop_token_ids=(5,),
        ignore_eos=True,
        logit_bias={7: -2.5},
    )
    async with served(wire) as (generator, client):
        await client.generate("Hi", sampling, cache_salt="salt")
        [request] = generator.submitted
    drawn = request.sampling
    assert (drawn.max_tokens, drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (9, 0.0, 0.5, 3, 0.1)
    assert (drawn.seed, drawn.frequency_penalty, drawn.repetition_penalty) == (0, -1.0, 1.5)
    assert drawn.logit_bias == ((7, -2.5),)
    assert (request.stop, drawn.stop_token_ids, drawn.ignore_eos, request.salt) == (("xx",), (5,), True, "salt")


@wires
@pytest.mark.parametrize("prompt", ["Hi", [Message("user", "Hi")]], ids=["text", "chat"])
async def test_log_probabilities(wire: str, prompt: Prompt) -> None:
    async with served(wire, answers=["aé"]) as (_, client):
        answer = await client.generate(prompt, Sampling(logprobs=2))
        plain = await client.generate(prompt)
    assert [entry.token for entry in answer.logprobs] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<end>"]
    assert {entry.logprob for entry in answer.logprobs} == {-0.25}
    assert answer.logprobs[0].top == (("a", -0.25), ("b", -0.5))
    assert answer.text == plain.text == "aé"
    assert not plain.logprobs


WEATHER = Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Soon")
TOOLS = Tools((WEATHER, Tool("now")))
CALLS = (
    'Well. <tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
ROOM = replace(FAKE_MODEL, max_context=4096)


@wires
async def test_tool_calls_and_what_comes_after_them(wire: str) -> None:
    chat = [Message("user", "Hi")]
    async with served(wire, answers=[CALLS], model=ROOM) as (generator, client):
        async with client.stream(chat, tools=TOOLS) as stream:
            pieces = [piece async for piece in stream]
            answer = stream.answer
        assert (answer.text, answer.finish_reason) == ("Well.", "tool_calls")
        weather, now = answer.tool_calls
        assert (weather.name, weather.arguments, now.name, now.arguments) == ("weather", '{"city": "x"}', "now", "{}")
        assert weather.id != now.id
        assert sum(bool(piece.calls) for piece in pieces) > len(weather.arguments) // 2
        results = [Message("tool", "rain", tool_call_id=call.id) for call in answer.tool_calls]
        await client.generate([*chat, answer.message, *results], tools=TOOLS)
        one, other = (
            bytes(token for token in request.prompt if token < 256).decode() for request in generator.submitted
        )
    assert '"description": "Soon"' in one
    assert '"name": "weather", "arguments": {"city": "x"}' in other
    assert "tool\nrain" in other


@wires
async def test_which_tools_may_or_must_be_called(wire: str) -> None:
    chat = [Message("user", "Hi")]
    async with served(wire, answers=[CALLS], model=ROOM) as (generator, client):
        answer = await client.generate(chat, tools=replace(TOOLS, parallel=False))
        assert [call.name for call in answer.tool_calls] == ["weather"]
        answer = await client.generate(chat, tools=replace(TOOLS, mode="none"))
        assert (answer.text, answer.finish_reason, answer.tool_calls) == (CALLS, "stop", ())
        await client.generate(chat, tools=replace(TOOLS, mode="required", allowed=("now",)))
        grammar = generator.submitted[-1].sampling.grammar
        assert grammar is not None
        assert "now" in grammar.text
        assert "weather" not in grammar.text
        for prompt, tools in (("Hi", TOOLS), (chat, replace(TOOLS, allowed=("g",)))):
            with pytest.raises(InvalidRequest):
                await client.generate(prompt, tools=tools)
        with pytest.raises(InvalidRequest):
            await client.generate(chat, tools=Tools((Tool("f", {"minimum": float("nan")}),)))
        assert len(generator.submitted) == 3


@wires
async def test_reasoning(wire: str) -> None:
    tokenizer = ByteTokenizer(style=ChatStyle(marks_reasoning=True))
    async with served(wire, answers=["<think>hm</think>Yes."], tokenizer=tokenizer) as (_, client):
        answer = await client.generate([Message("user", "Hi")])
        assert (answer.reasoning, answer.text) == ("hm", "Yes.")
        assert (await client.generate([Message("user", "Hi"), answer.message])).reasoning == "hm"


@wires
async def test_a_refusal_is_tried_again_no_sooner_than_the_server_asks(wire: str) -> None:
    waits = Waits()
    refusal = Overloaded("the queue is full", 2.0)
    async with served(wire, waits.caller(), refusal=refusal, num_refusals=2, answers=["abc"]) as (generator, client):
        answer = await client.generate("Hi")
    assert answer.text == "abc"
    assert len(generator.submitted) == 1
    assert len(waits.taken) == 2
    assert all(2.0 <= delay <= 3.5 for delay in waits.taken)


@wires
async def test_attempts_are_limited_and_so_is_waiting(wire: str) -> None:
    waits = Waits()
    async with served(wire, waits.caller(RetryPolicy(max_attempts=3)), refusal=Overloaded("full", 2.0)) as (_, client):
        with pytest.raises(Overloaded) as refused:
            await client.generate("Hi")
        assert len(waits.taken) == 2
        assert refused.value.retry_after_s >= 2.0
        with pytest.raises(Overloaded):
            await client.generate("Hi", timeout_s=1.0)
    assert len(waits.taken) == 2  # to wait would outlast the deadline


@wires
async def test_what_the_client_must_change_is_not_tried_again(wire: str) -> None:
    waits = Waits()
    async with served(wire, waits.caller()) as (generator, client):
        with pytest.raises(InvalidRequest) as bad:
            await client.generate("Hi", Sampling(temperature=3.0))
        with pytest.raises(UnknownModel):
            await client.generate("Hi", model="other")
    assert bad.value.field == "temperature"
    assert not waits.taken
    assert not generator.submitted


@wires
async def test_a_failure_before_the_first_text_is_tried_again_and_after_it_is_not(wire: str) -> None:
    waits = Waits()
    async with served(wire, waits.caller(), answers=["abcdef"], failure=PeerLost("gone")) as (generator, client):
        with pytest.raises(PeerLost, match="gone"):
            await client.generate("Hi")
        assert len(generator.submitted) == RetryPolicy().max_attempts
        generator.submitted.clear()
        generator.fail_at = 3
        pieces: list[str] = []
        async with client.stream("Hi") as stream:
            with pytest.raises(PeerLost, match="gone"):
                await read_into(pieces, stream)
            with pytest.raises(RuntimeError):
                _ = stream.answer
    assert "".join(pieces) == "abc"
    assert len(generator.submitted) == 1


@wires
async def test_leaving_the_stream_cancels_the_request(wire: str) -> None:
    async with served(wire, answers=["abcdef"], hold_at=2) as (generator, client):
        async with client.stream("Hi") as stream:
            async for _ in stream:
                break
        await until(lambda: len(generator.cancelled) == 1)
        assert not generator.live


@wires
async def test_the_deadline_ends_a_request_that_hangs(wire: str) -> None:
    async with served(wire, answers=["abcdef"], hold_at=2) as (generator, client):
        pieces: list[str] = []
        async with client.stream("Hi", timeout_s=0.3) as stream:
            with pytest.raises(DeadlineExceeded):
                await read_into(pieces, stream)
        assert "".join(pieces) == "ab"
        assert 0 < generator.submitted[0].time_left_s <= 0.3
        await until(lambda: not generator.live)


@wires
async def test_a_router_that_is_not_there_is_unavailable(wire: str) -> None:
    waits = Waits()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with client_of(wire, address, waits.caller(RetryPolicy(max_attempts=2))) as client:
            with pytest.raises(Unavailable):
                await client.generate("Hi", timeout_s=20)
    assert len(waits.taken) == 1


@wires
async def test_the_model(wire: str) -> None:
    async with served(wire, Waits().caller(NEVER)) as (generator, client):
        model = await client.model()
        generator.model = None
        with pytest.raises(TwostrokeError):
            await client.model()
    assert (model.name, model.max_context) == ("fake", 512)


@wires
async def test_tokens(wire: str) -> None:
    chat = [Message("user", "Hi")]
    async with served(wire, Waits().caller(NEVER), answers=["a"]) as (generator, client):
        assert await client.tokenize("aé") == [97, 0xC3, 0xA9]
        tokens = await client.tokenize(chat)
        await client.generate(chat)
        assert generator.submitted[0].prompt == tuple(tokens)
        assert await client.detokenize([97, 0xC3, 0xA9, 257, 0xC3]) == "aé\ufffd"
        with pytest.raises(InvalidRequest) as bad:
            await client.detokenize([97, 300])
    assert bad.value.field == ("tokens[1]" if wire == "http" else "token_ids[1]")


@wires
@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        pytest.param("\ud800", Sampling(), id="a lone surrogate"),
        pytest.param([-1], Sampling(), id="a negative id"),
        pytest.param([1, Message("user", "x")], Sampling(), id="a message among ids"),
        pytest.param([Message("user", "x"), 1], Sampling(), id="an id among messages"),
        pytest.param("x", Sampling(temperature=float("nan")), id="nan"),
        pytest.param("x", Sampling(seed=1 << 70), id="a huge seed"),
        pytest.param("x", Sampling(logit_bias={-5: 1.0}), id="a bias on no token"),
    ],
)
async def test_what_cannot_be_asked_is_the_callers_mistake(wire: str, prompt: Prompt, sampling: Sampling) -> None:
    waits = Waits()
    async with served(wire, waits.caller()) as (generator, client):
        with pytest.raises(InvalidRequest):
            await client.generate(prompt, sampling)
    assert not generator.submitted
    assert not waits.taken


async def test_loads_and_cancel_over_grpc() -> None:
    report = LoadReport(
        ledger=Ledger(free=5, cached=3, active=2, leased=0, quarantined=0),
        running=2,
        waiting=1,
        leases=0,
        queued_tokens=40,
        step_age_s=0.0,
        num_steps=9,
        event_sequence=0,
        draining=False,
    )
    workers = [
        WorkerLoad(WorkerId("prefill-0"), Role.PREFILL, report, 10, draining=False),
        WorkerLoad(WorkerId("decode-0"), Role.DECODE, None, 20, draining=True),
    ]
    async with grpc_api(workers=workers, hold_at=1) as (generator, address), GrpcClient(address) as client:
        first, second = await client.loads()
        assert (first.worker_id, first.role, first.known, first.running, first.waiting) == (
            "prefill-0",
            "prefill",
            True,
            2,
            1,
        )
        assert (first.pages_free, first.pages_total, first.queued_tokens) == (8, 10, 40)
        assert (second.role, second.known, second.pages_total, second.draining) == ("decode", False, 20, True)
        async with client.stream("Hi") as stream:
            await anext(aiter(stream))
            assert await client.cancel(generator.submitted[0].request_id)
            assert not await client.cancel("nobody")
