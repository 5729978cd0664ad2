"""Tools and reasoning over `/v1/responses` and `/v1/messages`, by the `openai` and `anthropic` packages."""

import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

from tests.gateway_server import CHAT, Gateway, events_of
from tests.gateway_server import gateway as small_gateway
from twostroke.router.fake_generator import FAKE_MODEL
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\u00eds", "days": 3}}\n</tool_call>'
ARGUMENTS = '{"city": "Par\\u00eds", "days": 3}'
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Soon", "parameters": WEATHER}}]
OF_RESPONSES: list[Any] = [
    {"type": "function", "name": "weather", "description": "Soon", "parameters": WEATHER, "strict": None}
]
OF_MESSAGES: list[Any] = [{"name": "weather", "description": "Soon", "input_schema": WEATHER}]
HI: Any = [{"role": "user", "content": "Hi"}]


def gateway(style: ChatStyle | None = None, **fields: Any) -> AbstractAsyncContextManager[Gateway]:
    """With room for tools in the prompt."""
    fields.setdefault("tokenizer", ByteTokenizer(style=style))
    return small_gateway(model=replace(FAKE_MODEL, max_context=4096), **fields)


def openai_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)


def anthropic_of(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=10)


async def test_a_response_that_calls_streamed_and_whole() -> None:
    asked: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": OF_RESPONSES}
    async with gateway(answers=[f"Let me see.{CALL}"]) as server, openai_of(server.url) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
    for response in (whole, final):
        text, call = response.output
        assert (text.type, call.type) == ("message", "function_call")
        assert response.output_text == "Let me see."
        assert (call.name, call.arguments) == ("weather", ARGUMENTS)  # type: ignore[union-attr]
        assert call.call_id.startswith("call_")  # type: ignore[union-attr]
        assert (response.status, response.tools[0].type) == ("completed", "function")
    deltas = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ARGUMENTS
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    kinds = [event.type for event in seen if "delta" not in event.type]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_message_that_uses_a_tool_streamed_and_whole() -> None:
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": HI, "tools": OF_MESSAGES}
    async with gateway(answers=[f"Let me see.{CALL}"]) as server, anthropic_of(server.url) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        raw = await server.post("/v1/messages", {**asked, "stream": True})
    for message in (whole, final):
        text, call = message.content
        assert text.type == "text"
        assert text.text == "Let me see."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "París", "days": 3})
        assert message.stop_reason == "tool_use"
    pieces = [
        data["delta"].get("partial_json", "")
        for name, data in events_of(raw.text)
        if name.endswith("_delta")
        if "delta" in data
    ]
    assert "".join(pieces) == ARGUMENTS
    blocks = [
        (name, data["index"])
        for name, data in events_of(raw.text)
        if name in ("content_block_start", "content_block_stop")
    ]
    assert blocks == [
        ("content_block_start", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_stop", 1),
    ]


async def test_the_prompt_with_a_history_of_calls_is_that_of_a_chat() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]
    items: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
        {"role": "user", "content": "Thanks"},
    ]
    used = {"type": "tool_use", "id": "call_1", "name": "weather", "input": json.loads(ARGUMENTS)}
    turns: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, used]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ]
    async with gateway() as server, openai_of(server.url) as openai, anthropic_of(server.url) as anthropic:
        await server.post(CHAT, {"model": "fake", "messages": chat, "tools": CHAT_TOOLS})
        await openai.responses.create(model="fake", input=items, tools=OF_RESPONSES)
        await anthropic.messages.create(model="fake", max_tokens=50, messages=turns, tools=OF_MESSAGES)
        of_chat, *others = (request.prompt for request in server.generator.submitted)
        counted = await anthropic.messages.count_tokens(model="fake", messages=turns, tools=OF_MESSAGES)
    assert others == [of_chat, of_chat]
    assert counted.input_tokens == len(of_chat)


@pytest.mark.parametrize(
    ("of_chat", "of_responses", "of_messages"),
    [
        pytest.param("required", "required", {"type": "any"}, id="any"),
        pytest.param(
            {"type": "function", "function": {"name": "weather"}},
            {"type": "function", "name": "weather"},
            {"type": "tool", "name": "weather"},
            id="a named one",
        ),
        pytest.param("none", "none", {"type": "none"}, id="none"),
    ],
)
async def test_a_choice_means_what_it_means_in_chats(of_chat: Any, of_responses: Any, of_messages: Any) -> None:
    async with gateway() as server, openai_of(server.url) as openai, anthropic_of(server.url) as anthropic:
        chat = {"model": "fake", "messages": HI, "tools": CHAT_TOOLS, "tool_choice": of_chat}
        assert (await server.post(CHAT, chat)).status_code == 200
        await openai.responses.create(model="fake", input="Hi", tools=OF_RESPONSES, tool_choice=of_responses)
        await anthropic.messages.create(
            model="fake", max_tokens=50, messages=HI, tools=OF_MESSAGES, tool_choice=of_messages
        )
        first, *others = ((request.prompt, request.sampling.grammar) for request in server.generator.submitted)
    assert others == [first, first]


async def test_reasoning_is_told_apart() -> None:
    style = ChatStyle(marks_reasoning=True)
    async with (
        gateway(style, answers=["<think>Hm.</think>Yes."]) as server,
        openai_of(server.url) as openai,
        anthropic_of(server.url) as anthropic,
    ):
        response = await openai.responses.create(model="fake", input="Hi")
        async with openai.responses.stream(model="fake", input="Hi") as stream:
            streamed = await stream.get_final_response()
        message = await anthropic.messages.create(model="fake", max_tokens=100, messages=HI)
        async with anthropic.messages.stream(model="fake", max_tokens=100, messages=HI) as events:
            final = await events.get_final_message()
        turns: Any = [*HI, {"role": "assistant", "content": message.content}, *HI]
        await anthropic.messages.create(model="fake", max_tokens=100, messages=turns)
        items: Any = [*HI, *[item.model_dump(exclude_none=True) for item in response.output], *HI]
        await openai.responses.create(model="fake", input=items)
        *_, of_turns, of_items = (request.prompt for request in server.generator.submitted)
    for answer in (response, streamed):
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
        assert answer.output_text == "Yes."
    for told in (message, final):
        thinking, text = told.content
        assert thinking.type == "thinking"
        assert text.type == "text"
        assert (thinking.thinking, text.text) == ("Hm.", "Yes.")
        assert told.stop_reason == "end_turn"
    assert of_turns == of_items


async def test_the_tool_runner_of_the_anthropic_package() -> None:
    asked_for: list[str] = []

    @beta_async_tool
    async def weather(city: str, days: int) -> str:
        """The weather soon."""
        asked_for.append(f"{city} {days}")
        server.generator.answers = ["Rain."]
        return "Rain."

    async with gateway(answers=[CALL]) as server, anthropic_of(server.url) as client:
        runner = client.beta.messages.tool_runner(model="fake", max_tokens=200, messages=HI, tools=[weather])
        last = await runner.until_done()
    assert asked_for == ["París 3"]
    assert [block.text for block in last.content if block.type == "text"] == ["Rain."]


async def test_an_answer_that_is_cut_within_a_call() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"days": 1000000000000000000000000, "city": "Par'
    asked: dict[str, Any] = {"model": "fake", "max_tokens": len(call), "messages": HI, "tools": OF_MESSAGES}
    async with gateway(answers=[call]) as server, anthropic_of(server.url) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        [used] = message.content
        assert used.type == "tool_use"
        assert (used.input, message.stop_reason) == ({"days": 10**24}, "max_tokens")


async def test_output_of_the_packages_comes_back_as_they_write_it() -> None:
    asked: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": OF_RESPONSES}
    async with gateway(answers=[f"Let me see.{CALL}"]) as server, openai_of(server.url) as client:
        response = await client.responses.parse(**asked)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
        for output in (response.output, final.output):
            for items in (output, [item.to_dict() for item in output], [item.model_dump() for item in output]):
                await client.responses.create(**{**asked, "input": [*HI, *items]})
        prompts = [request.prompt for request in server.generator.submitted[2:]]
    # They differ by the ids of their calls alone.
    assert len(prompts) == 6
    assert len(set(prompts)) == 2


USED = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
BAD_TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"tools": [{"name": "w"}]}, "tools[0].input_schema", id="no schema"),
        pytest.param({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", id="name"),
        pytest.param({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", id="type"),
        pytest.param({"tools": [BAD_TOOL]}, "tools[0].input_schema", id="a schema that cannot be enforced"),
        pytest.param({"tools": OF_MESSAGES, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", id="x"),
        pytest.param({"tools": OF_MESSAGES, "tool_choice": "auto"}, "tool_choice", id="choice's type"),
        pytest.param(
            {"messages": [{"role": "assistant", "content": [USED] * 129}, *HI]}, "messages[0].content", id="many calls"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [RESULT] * 8193}]}, "messages[0].content", id="many results"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [RESULT] * 5000}] * 2}, "messages", id="many results in all"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{**RESULT, "x": None, "y": 1}]}]},
            "messages[0].content[0].y",
            id="unknown beside null",
        ),
        pytest.param({"tool_choice": {"type": "any"}}, "tool_choice", id="no tools"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
            id="a result of nothing",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content[0].type",
            id="a user's call",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 5}]},
                    *HI,
                ]
            },
            "messages[0].content[0].input",
            id="input",
        ),
    ],
)
async def test_what_messages_refuse_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with gateway() as server:
        answer = await server.post("/v1/messages", {"model": "fake", "max_tokens": 50, "messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", id="name"),
        pytest.param({"tools": [{"type": "function", "name": "w", "nonsense": 1}]}, "tools[0].nonsense", id="unknown"),
        pytest.param(
            {"tools": [{"type": "function", "name": "w", "parameters": BAD_TOOL["input_schema"], "strict": True}]},
            "tools[0].parameters",
            id="a schema that cannot be enforced",
        ),
        pytest.param(
            {"tools": OF_RESPONSES, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", id="no such"
        ),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="no tools"),
        pytest.param({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name", id="a call's name"),
        pytest.param({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", id="of nothing"),
        pytest.param(
            {"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output", id="output"
        ),
    ],
)
async def test_what_responses_refuse_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with gateway() as server:
        answer = await server.post("/v1/responses", {"model": "fake", "input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
