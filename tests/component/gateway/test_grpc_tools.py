"""Tools, reasoning, `best_of` and prompts scored alone over gRPC: as over HTTP, and refused by the field's name."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import grpc
import pytest

from tests.client_servers import grpc_serving
from tests.component.gateway.test_tools import (
    ARGUMENTS,
    BODY,
    CALL,
    HELLO,
    JSON_FORM,
    NAMED,
    ONLY_NOW,
    ONLY_WEATHER,
    STRICT,
    TOOLS,
    gateway,
    history,
)
from tests.faces import GrpcAnswer
from tests.gateway_server import CHAT, COMPLETION, Gateway
from tests.grpc_chats import GrpcChoice, grpc_chat
from twostroke.cluster.config import BudgetSection, RouterSection
from twostroke.cluster.core.errors import InvalidRequest, TwostrokeError
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.status import from_rpc
from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle, ToolFormat

FORM = common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_SCHEMA, text='{"type": "object"}')
OF_MESSAGE = ("max_tokens", "n", "logprobs", "stop", "seed", "best_of", "prompt_logprobs")


@asynccontextmanager
async def both(style: ChatStyle | None = None, **fields: Any) -> AsyncIterator[tuple[Gateway, InferenceStub]]:
    """Two faces of one generator."""
    tokenizer = ByteTokenizer(style=style)
    async with (
        gateway(tokenizer=tokenizer, **fields) as it,
        grpc_serving(it.generator, tokenizer, fields.get("config")) as address,
        open_channel(address) as channel,
    ):
        yield it, InferenceStub(channel)  # type: ignore[no-untyped-call]


def message_of(body: dict[str, Any]) -> pb.GenerateRequest:
    """What says over gRPC what a body of the chat endpoint says."""
    asked = {name: body[name] for name in OF_MESSAGE if name in body}
    asked["logprobs"] = body.get("top_logprobs", 0) if body.get("logprobs") else None
    if "response_format" in body:
        asked["grammar"] = FORM
    return pb.GenerateRequest(model="fake", chat=grpc_chat(body), **asked)


async def choices_of(stub: InferenceStub, request: pb.GenerateRequest) -> dict[int, GrpcChoice]:
    read = GrpcAnswer()
    async for message in stub.Generate(request, timeout=10):
        read.take(message)
    read.body()
    return read.choices


async def refusal_of(stub: InferenceStub, request: pb.GenerateRequest) -> TwostrokeError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await choices_of(stub, request)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return from_rpc(raised.value)


def told(choice: GrpcChoice) -> tuple[str, str, list[tuple[str, str]], str]:
    calls = [(call["name"], call["arguments"]) for call in choice.calls]
    assert len({call["id"] for call in choice.calls}) == len(calls)
    return choice.text, choice.reasoning, calls, choice.finish_reason


def told_by_http(choice: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


LLAMA = '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "x", "days": 1}}'
THOUGHT = "<think>\nhm\n</think>\n\nWell. " + CALL


TEXTS = ("Hello.", "", "Let me see. " + CALL, CALL + "\n" + CALL, THOUGHT, "[TOOL_CALLS]now{}", LLAMA)
EXTRAS: list[dict[str, Any]] = [
    {},
    {"tools": []},
    {"tools": TOOLS[1:]},
    {"tools": STRICT},
    {"tool_choice": "none"},
    {"tool_choice": "required", "logprobs": True, "top_logprobs": 1},
    {"tool_choice": NAMED, "n": 2},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_WEATHER}},
    {"tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_NOW}},
    {"parallel_tool_calls": False},
    {"response_format": JSON_FORM},
    {"stop": [", "]},
    {"stop": ["days"]},
    {"max_tokens": 12},
    {"max_tokens": 62},
    {"messages": history(ARGUMENTS)},
    {"messages": history("[")},
]


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("format", ToolFormat)
async def test_it_says_what_http_says(format: ToolFormat, reasons: bool) -> None:
    async with both(ChatStyle(format, reasons)) as (it, stub):
        for text, extra in product(TEXTS, EXTRAS):
            it.generator.answers = [text]
            body = {**BODY, **extra}
            answer = await it.post(CHAT, body)
            assert answer.status_code == 200, answer.text
            choices = await choices_of(stub, message_of(body))
            assert [told(choices[index]) for index in sorted(choices)] == [
                told_by_http(choice) for choice in answer.json()["choices"]
            ], (text, extra)
            one, other = it.generator.submitted[-2:]
            assert (one.prompt, one.sampling.grammar) == (other.prompt, other.sampling.grammar)
            for choice in choices.values():
                assert len(choice.token_ids) == choice.completion_tokens
                assert len(choice.logprobs) == (choice.completion_tokens if body.get("logprobs") else 0)


async def test_a_call_goes_out_as_it_is_written() -> None:
    async with both(answers=[CALL]) as (_, stub):
        items = [item async for item in stub.Generate(message_of(BODY), timeout=10)]
    pieces = [piece.arguments for item in items for piece in item.delta.tool_calls]
    assert "".join(pieces) == ARGUMENTS
    assert max(map(len, pieces)) < len("\\u00ed") + 2
    async with both(answers=[CALL], hold_at=CALL.index("days")) as (it, stub):
        call = stub.Generate(message_of(BODY), timeout=10)
        async for message in call:
            if message.delta.tool_calls and message.delta.tool_calls[0].name:
                break
        call.cancel()
        await it.until_cancelled(1)


async def test_tokenize_shows_the_tools_as_generate_does() -> None:
    async with both() as (it, stub):
        for extra in ({}, {"tool_choice": "none"}):
            chat = grpc_chat({**BODY, **extra})
            await choices_of(stub, pb.GenerateRequest(model="fake", chat=chat))
            tokens = (await stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)).token_ids
            assert tuple(tokens) == it.generator.submitted[-1].prompt
        assert len({request.prompt for request in it.generator.submitted}) == 2


async def test_the_order_and_the_numbers_of_a_schema_are_kept() -> None:
    text = '{"properties": {"z": {"const": 12345678901234567}, "a": {"maximum": 1.5}}}'
    chat = grpc_chat({"messages": [HELLO]})
    chat.tools.add(name="f", parameters=text)
    async with both() as (it, stub):
        await choices_of(stub, pb.GenerateRequest(model="fake", chat=chat))
        prompt = bytes(token for token in it.generator.submitted[-1].prompt if token < 256).decode()
    shown = json.loads(prompt[prompt.index('{"type": "object", "properties"') :].split("}}}")[0] + "}}}")
    assert json.dumps(shown["properties"]) == json.dumps(json.loads(text)["properties"])


USER = [pb.ChatMessage(role="user", content="x")]


def tools(**changes: Any) -> pb.ChatMessages:
    chat = grpc_chat(BODY)
    for name, value in changes.items():
        setattr(chat.tools[0], name, value)
    return chat


def choosing(**choice: Any) -> pb.ChatMessages:
    return pb.ChatMessages(
        messages=[pb.ChatMessage(role="user")], tools=chat_tools(), tool_choice=pb.ToolChoice(**choice)
    )


def chat_tools() -> list[pb.Tool]:
    return list(grpc_chat(BODY).tools)


def saying(**message: Any) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(**{"role": "assistant", "content": "x", **message})])


def calling(**call: Any) -> pb.ChatMessages:
    return saying(tool_calls=[pb.ToolCall(**{"id": "a", "name": "f", "arguments": "{}", **call})])


DEEP = '{"a":' * 99 + "1" + "}" * 99
BAD_CHATS: list[tuple[pb.ChatMessages, str]] = [
    (tools(name="a b"), "chat.tools[0].name"),
    (tools(name="now"), "chat.tools[1].name"),
    (tools(parameters="{"), "chat.tools[0].parameters"),
    (tools(parameters="[]"), "chat.tools[0].parameters"),
    (tools(parameters='{"minimum": NaN}'), "chat.tools[0].parameters"),
    (tools(parameters='{"const": "\\ud800"}'), "chat.tools[0].parameters"),
    (tools(parameters='{"type": "array"}'), "chat.tools[0].parameters.type"),
    (tools(parameters='{"enum": ["' + "x" * 70000 + '"]}'), "chat.tools[0].parameters"),
    (tools(parameters=DEEP), "chat.tools[0].parameters"),
    (tools(parameters="[" * 100_000), "chat.tools[0].parameters"),
    (tools(parameters='{"not": {}}', strict=True), "chat.tools[0].parameters"),
    (pb.ChatMessages(messages=USER, tools=chat_tools() * 65), "chat.tools"),
    (choosing(mode=7), "chat.tool_choice.mode"),
    (choosing(name="g"), "chat.tool_choice.name"),
    (choosing(name=""), "chat.tool_choice.name"),
    (choosing(allowed=pb.AllowedTools()), "chat.tool_choice.allowed"),
    (choosing(allowed=pb.AllowedTools(mode=pb.TOOL_MODE_NONE, names=["now"])), "chat.tool_choice.allowed"),
    (choosing(allowed=pb.AllowedTools(mode=9, names=["now"])), "chat.tool_choice.allowed.mode"),  # type: ignore[arg-type]
    (choosing(allowed=pb.AllowedTools(names=["now", "g"])), "chat.tool_choice.allowed.names[1]"),
    (pb.ChatMessages(messages=USER, tool_choice=pb.ToolChoice(name="f")), "chat.tool_choice"),
    (calling(name="<|x|>"), "chat.messages[0].tool_calls[0].name"),
    (calling(arguments=DEEP), "chat.messages[0].tool_calls[0].arguments"),
    (saying(role="user", tool_calls=[pb.ToolCall(name="f")]), "chat.messages[0].tool_calls"),
    (saying(tool_call_id="a"), "chat.messages[0].tool_call_id"),
    (saying(role="user", reasoning_content="a"), "chat.messages[0].reasoning_content"),
    (saying(role="robot"), "chat.messages[0].role"),
    (saying(name="a b"), "chat.messages[0].name"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    *(({"chat": chat}, field) for chat, field in BAD_CHATS),
    ({"chat": choosing(mode=pb.TOOL_MODE_REQUIRED), "min_tokens": 2}, "min_tokens"),
    ({"chat": choosing(name="now"), "ignore_eos": True}, "ignore_eos"),
    ({"chat": tools(), "grammar": common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="a")}, "grammar"),
    ({"text": "x", "n": 3, "best_of": 2}, "best_of"),
    ({"text": "x", "best_of": 0}, "best_of"),
    ({"text": "x", "best_of": 129}, "best_of"),
    ({"text": "x", "max_tokens": 0}, "max_tokens"),
    ({"text": "x", "max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1}, "min_tokens"),
]


async def test_what_cannot_be_done_is_refused_by_its_name() -> None:
    async with both() as (it, stub):
        for changes, field in BAD:
            error = await refusal_of(stub, pb.GenerateRequest(model="fake", **changes))
            assert isinstance(error, InvalidRequest)
            assert error.field == field, (changes, error.message)
        assert it.generator.submitted == []


async def test_what_is_taken_apart_or_chosen_cannot_go_on() -> None:
    config = RouterSection(budget=BudgetSection(output_tokens=6))
    async with both(config=config, answers=["Hello, world!"]) as (_, stub):
        chat = grpc_chat({"messages": [HELLO]})
        items = [item async for item in stub.Generate(pb.GenerateRequest(model="fake", chat=chat), timeout=10)]
        [continuation] = [item.choice_end.continuation for item in items if item.HasField("choice_end")]
        assert continuation
        for changes, field in (({"chat": grpc_chat(BODY)}, "continuation"), ({"chat": chat, "best_of": 2}, "best_of")):
            request = pb.GenerateRequest(model="fake", continuation=continuation, **changes)
            error = await refusal_of(stub, request)
            assert isinstance(error, InvalidRequest)
            assert error.field == field
        async for message in stub.Generate(message_of(BODY), timeout=10):
            assert not message.choice_end.continuation


async def test_the_best_choices_are_told_at_the_end() -> None:
    async with both(answers=["aaaa", "b", "cc"]) as (it, stub):
        body = {"model": "fake", "prompt": "x", "n": 2, "best_of": 3, "logprobs": 1}
        for extra in ({}, {"logprobs": 1}):
            answer = (await it.post(COMPLETION, {**body, **extra})).json()
            request = pb.GenerateRequest(model="fake", text="x", n=2, best_of=3, **extra)
            items = [item async for item in stub.Generate(request, timeout=10)]
            deltas = [item.delta for item in items if item.HasField("delta")]
            assert [delta.text for delta in deltas] == [choice["text"] for choice in answer["choices"]]
            assert all(len(delta.logprobs) == (len(delta.token_ids) if extra else 0) for delta in deltas)
            assert items[-1].finished.completion_tokens == answer["usage"]["completion_tokens"]


async def test_a_prompt_scored_alone() -> None:
    async with both() as (_, stub):
        request = pb.GenerateRequest(model="fake", text="abc", max_tokens=0, prompt_logprobs=1, n=2)
        items = [item async for item in stub.Generate(request, timeout=10)]
    assert [item.WhichOneof("item") for item in items] == [
        "accepted",
        "prompt_logprobs",
        "choice_end",
        "choice_end",
        "finished",
    ]
    assert [entry.token.token for entry in items[1].prompt_logprobs.logprobs] == [b"b", b"c"]
    assert items[-1].finished.completion_tokens == items[2].choice_end.completion_tokens == 0


async def test_a_fault_found_by_a_worker_is_of_the_messages_field() -> None:
    async with both() as (it, stub):
        await choices_of(stub, message_of({**BODY, "tools": STRICT}))
        assert it.generator.submitted[-1].grammar_field == "chat.tools"
        it.generator.model = replace(it.generator.model, max_context=64) if it.generator.model else None
        error = await refusal_of(stub, message_of(BODY))
    assert isinstance(error, InvalidRequest)
    assert error.field == "chat.messages"
