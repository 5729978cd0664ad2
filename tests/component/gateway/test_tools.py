"""Tools and reasoning over HTTP, with the `openai` package and without: fields, history, answers whole and streamed."""

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.gateway_server import CHAT, Gateway, events
from tests.gateway_server import gateway as small_gateway
from twostroke.cluster.config import TemplatesSection
from twostroke.cluster.core.grammar import GrammarKind
from twostroke.router.fake_generator import FAKE_MODEL
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle, ToolFormat

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Soon (or not)", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "weather"}}
ONLY_NOW = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
ONLY_WEATHER = {"mode": "required", "tools": [NAMED]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\u00eds", "days": 3}}\n</tool_call>'
ARGUMENTS = '{"city": "Par\\u00eds", "days": 3}'
HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "fake", "messages": [HELLO], "tools": TOOLS}
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def gateway(style: ChatStyle | None = None, **fields: Any) -> AbstractAsyncContextManager[Gateway]:
    """With room for tools in the prompt."""
    fields.setdefault("tokenizer", ByteTokenizer(style=style))
    return small_gateway(model=replace(FAKE_MODEL, max_context=4096), **fields)


def joined(chunks: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's deltas make, and its finish reason."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        assert delta or choice["finish_reason"] or choice["logprobs"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"}
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return message, finish


async def ask(it: Gateway, **extra: Any) -> tuple[dict[str, Any], str | None]:
    """The message and finish reason, which are the same streamed as whole."""
    answer = await it.post(CHAT, {**BODY, **extra})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = choice["message"]
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", [])
    ]
    assert message["content"] is not None or calls
    whole = {"content": message["content"] or "", "tool_calls": calls}
    if "reasoning_content" in message:
        whole["reasoning_content"] = message["reasoning_content"]
    streamed, finish = joined(events((await it.post(CHAT, {**BODY, **extra, "stream": True})).text)[:-1])
    for one in (whole, streamed):
        ids = [call.pop("id") for call in one["tool_calls"]]
        assert len(set(ids)) == len(ids)
        assert all(isinstance(call_id, str) and call_id for call_id in ids)
    assert (streamed, finish) == (whole, choice["finish_reason"])
    return whole, finish


@pytest.mark.parametrize(
    ("text", "extra", "content", "calls", "finish"),
    [
        ("Hello.", {}, "Hello.", [], "stop"),
        ("", {}, "", [], "stop"),
        ("Let me see. " + CALL, {}, "Let me see.", [ARGUMENTS], "tool_calls"),
        (CALL + "\n" + CALL, {}, "", [ARGUMENTS, ARGUMENTS], "tool_calls"),
        (CALL + "\n" + CALL, {"parallel_tool_calls": False}, "", [ARGUMENTS], "tool_calls"),
        (CALL, {"tool_choice": "none"}, CALL, [], "stop"),
        (CALL, {"tools": []}, CALL, [], "stop"),
        (CALL, {"tools": TOOLS[1:]}, CALL, [], "stop"),
        (CALL, {"tools": STRICT}, "", [ARGUMENTS], "tool_calls"),
        (CALL, {"tool_choice": "required"}, "", [ARGUMENTS], "tool_calls"),
        (CALL, {"tool_choice": NAMED}, "", [ARGUMENTS], "stop"),
        (
            CALL,
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_WEATHER}},
            "",
            [ARGUMENTS],
            "tool_calls",
        ),
        (CALL, {"tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_NOW}}, CALL, [], "stop"),
        (CALL, {"response_format": JSON_FORM}, "", [ARGUMENTS], "tool_calls"),
        (CALL, {"logprobs": True}, "", [ARGUMENTS], "tool_calls"),
        (CALL, {"stop": [", "]}, "<tool_call>\n" + '{"name": "weather"', [], "stop"),
        (CALL, {"stop": ["days"]}, "", ['{"city": "Par\\u00eds", "'], "tool_calls"),
        (CALL, {"max_tokens": 62}, "", ['{"city": "Par\\u00'], "length"),
        (CALL, {"max_tokens": 12}, "<tool_call>\n", [], "length"),
    ],
)
async def test_calls_whole_and_streamed(
    text: str, extra: dict[str, Any], content: str, calls: list[str], finish: str
) -> None:
    async with gateway(answers=[text]) as it:
        message, reason = await ask(it, **extra)
    assert message["content"] == content
    assert [call["arguments"] for call in message["tool_calls"]] == calls
    assert all(call["name"] == "weather" for call in message["tool_calls"])
    assert reason == finish


@pytest.mark.parametrize(
    ("extra", "enforced"),
    [
        ({}, False),
        ({"tool_choice": "none", "tools": STRICT}, False),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_NOW}, "tools": STRICT}, False),
        ({"tools": STRICT}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"response_format": JSON_FORM}, True),
    ],
)
async def test_what_is_enforced_goes_to_the_workers_as_a_grammar(extra: dict[str, Any], enforced: bool) -> None:
    async with gateway() as it:
        assert (await it.post(CHAT, {**BODY, **extra})).status_code == 200
        [request] = it.generator.submitted
    grammar = request.sampling.grammar
    assert (grammar is not None) == enforced
    if grammar is not None:
        assert (grammar.kind, request.grammar_field) == (GrammarKind.GRAMMAR, "tools")
        assert '\\"weather\\"' in grammar.text


async def test_ids_are_of_their_call_and_in_the_models_form() -> None:
    for format, text, length in (
        (ToolFormat.HERMES, CALL + CALL, 29),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "now"}, {"name": "now"}]', 9),
    ):
        async with gateway(ChatStyle(format), answers=[text]) as it:
            answers = [(await it.post(CHAT, {**BODY, "n": 2})).json() for _ in range(2)]
        messages = [choice["message"] for answer in answers for choice in answer["choices"]]
        ids = {call["id"] for message in messages for call in message["tool_calls"]}
        assert len(ids) == 8
        assert all(len(call_id) == length and call_id.replace("_", "").isalnum() for call_id in ids)
        assert all(message["content"] is None for message in messages)


async def test_log_probabilities_of_calls_are_all_there() -> None:
    async with gateway(answers=["a " + CALL]) as it:
        whole = (await it.post(CHAT, {**BODY, "logprobs": True})).json()["choices"][0]["logprobs"]["content"]
        chunks = events((await it.post(CHAT, {**BODY, "logprobs": True, "stream": True})).text)[:-1]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for one in told if one for entry in one["content"]] == whole
    assert len(whole) == len("a " + CALL) + 1


async def test_reasoning_is_apart() -> None:
    style = ChatStyle(ToolFormat.HERMES, marks_reasoning=True)
    thought = "<think>\nhm\n</think>\n\nWell. " + CALL
    async with gateway(style, answers=[thought]) as it:
        for tools in (TOOLS, STRICT):
            message, finish = await ask(it, tools=tools)
            assert (message["reasoning_content"], message["content"], finish) == ("hm", "Well.", "tool_calls")
        message, finish = await ask(it, tools=None)
        assert (message["reasoning_content"], message["content"], finish) == ("hm", "Well. " + CALL, "stop")
        # A grammar leaves no room for reasoning: what looks like it is text.
        message, finish = await ask(it, tools=None, response_format=JSON_FORM)
        assert message == {"content": thought, "tool_calls": []}
    async with gateway(answers=[thought]) as it:
        message, finish = await ask(it, tools=None)
        assert message == {"content": thought, "tool_calls": []}


async def test_reasoning_that_the_template_opens(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[-1].content }}{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}")
    tokenizer = ByteTokenizer(TemplatesSection(chat_template=str(path)))
    async with gateway(tokenizer=tokenizer, answers=["hm </think> Well."]) as it:
        message, _ = await ask(it, tools=None)
        assert (message["reasoning_content"], message["content"]) == ("hm", "Well.")
        message, _ = await ask(it, tools=None, add_generation_prompt=False)
        assert message["content"] == "hm </think> Well."
        # Or a message that is gone on with.
        for begun, thought in (("<think> Oh, ", "hm"), ("<think>a</think> b ", None)):
            messages = [HELLO, {"role": "assistant", "content": begun}]
            message, _ = await ask(it, tools=None, messages=messages, continue_final_message=True)
            assert message.get("reasoning_content") == thought
        # This template does not show tools.
        refused = await it.post(CHAT, BODY)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert (await it.post(CHAT, {**BODY, "tool_choice": "required"})).status_code == 200


def history(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]


async def test_tools_and_history_reach_the_prompt() -> None:
    async with gateway() as it:

        async def prompt(**extra: Any) -> str:
            answer = await it.post(CHAT, {**BODY, **extra})
            assert answer.status_code == 200, answer.text
            return bytes(token for token in it.generator.submitted[-1].prompt if token < 256).decode()

        text = await prompt(messages=history('{"city": "x"}'))
        assert '"name": "weather", "description": "Soon (or not)"' in text
        assert '"arguments": {"city": "x"}' in text
        assert "tool\nrain" in text
        # What a model wrote badly goes back to it as it was.
        for arguments in ("[", '{"city": ', '{"a": NaN}', '"\\ud800"'):
            assert "assistant" in await prompt(messages=history(arguments))
        assert '"arguments": {}' in await prompt(messages=history(""))
        assert f'"arguments": {{"a": {10**30}}}' in await prompt(messages=history(f'{{"a": {10**30}}}'))
        long = [{"type": "function", "function": {"name": "f" * 128}}]
        assert "f" * 128 in await prompt(tools=long, messages=[HELLO])
        call = history("{}")[1] | {"content": []}
        assert await prompt(messages=[HELLO, call]) == await prompt(messages=history("{}")[:2])
        assert "Soon" not in await prompt(tool_choice="none")
        tokens = (await it.post("/tokenize", {"messages": [HELLO], "tools": TOOLS})).json()["tokens"]
        await prompt()
        assert tokens == list(it.generator.submitted[-1].prompt)


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def calling(**changes: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"messages": [HELLO, {"role": "assistant", "content": "x", "tool_calls": [call]}]}


def allowed(**changes: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {**ONLY_NOW, **changes}}}


PARAMETERS = "tools[0].function.parameters"
CATASTROPHE = {"properties": {"a": {"type": "string", "pattern": "(a{1000}){1000}"}}, "required": ["a"]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOLS[1], "x": 1}]}, "tools[0].x"),
    ({"tools": [TOOLS[1]] * 2}, "tools[1].function.name"),
    (tool(name="a b"), "tools[0].function.name"),
    (tool(name=None), "tools[0].function.name"),
    (tool(name="f" * 129), "tools[0].function.name"),
    (tool(description=1), "tools[0].function.description"),
    (tool(parameters=[]), PARAMETERS),
    (tool(parameters={"type": "array"}), f"{PARAMETERS}.type"),
    (tool(parameters={"enum": ["x" * 70000]}), PARAMETERS),
    (tool(strict=1), "tools[0].function.strict"),
    (tool(other=1), "tools[0].function.other"),
    ({**tool(parameters={"properties": {"a": {"type": "strin"}}}), "tool_choice": "required"}, PARAMETERS),
    (tool(parameters={"properties": {"a": {"type": "strin"}}}, strict=True), PARAMETERS),
    (tool(parameters={"not": {}}, strict=True), PARAMETERS),
    (tool(parameters=CATASTROPHE, strict=True), PARAMETERS),
    ({**tool(parameters=CATASTROPHE), "tool_choice": "required"}, PARAMETERS),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": ["none"]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice.function.name"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    (allowed(mode="none"), "tool_choice.allowed_tools"),
    (allowed(tools=[]), "tool_choice.allowed_tools"),
    (allowed(tools=[ONLY_NOW["tools"][0], {}]), "tool_choice.allowed_tools.tools[1].function.name"),
    (allowed(tools=[TOOLS[1]] * 3), "tool_choice.allowed_tools.tools"),
    ({"tool_choice": {**NAMED, "other": 1}}, "tool_choice.other"),
    ({"tool_choice": {"type": "function", "function": {"name": "now", "other": 1}}}, "tool_choice.function.other"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ({"tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    ({"tools": STRICT, "ignore_eos": True}, "ignore_eos"),
    (calling(type="custom"), "messages[1].tool_calls[0].type"),
    (calling(id=1), "messages[1].tool_calls[0].id"),
    (calling(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments"),
    (
        calling(function={"name": "f", "arguments": '{"a":' * 99 + "1" + "}" * 99}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (calling(function={"name": "<|x|>", "arguments": "{}"}), "messages[1].tool_calls[0].function.name"),
    (calling(function="f"), "messages[1].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "tool_call_id": 1, "content": "x"}]}, "messages[0].tool_call_id"),
]


async def test_what_cannot_be_done_is_refused_by_its_name() -> None:
    async with gateway() as it:
        for extra, field in BAD:
            answer = await it.post(CHAT, {**BODY, **extra})
            assert answer.status_code == 400, (extra, answer.text)
            assert answer.json()["error"]["param"] == field, answer.text
        assert it.generator.submitted == []


class Weather(pydantic.BaseModel):
    """Soon (or not)."""

    city: str
    days: int


def client_of(it: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=10)


async def test_the_openai_package() -> None:
    async with gateway(answers=["Let me see. " + CALL]) as it, client_of(it) as client:
        answer = await client.chat.completions.create(**BODY)
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.function.arguments == ARGUMENTS
        said = answer.choices[0].message.model_dump()
        again = [HELLO, said, {"role": "tool", "tool_call_id": call.id, "content": "x"}]
        await client.chat.completions.create(**{**BODY, "messages": again})


async def test_messages_that_the_openai_package_parsed_come_back() -> None:
    text = CALL.replace('"weather"', '"Weather"')
    body: dict[str, Any] = {"model": "fake", "messages": [HELLO], "tools": [openai.pydantic_function_tool(Weather)]}
    async with gateway(answers=[text]) as it, client_of(it) as client:
        parsed = (await client.chat.completions.parse(**body)).choices[0].message
        [call] = parsed.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "x"}
        for message in (parsed, parsed.model_dump(), parsed.model_dump(exclude_none=True)):
            await client.chat.completions.create(**{**body, "messages": [HELLO, message, result]})
        prompts = [request.prompt for request in it.generator.submitted[1:]]
    assert prompts == [prompts[0]] * 3


async def test_the_openai_packages_tool_helpers() -> None:
    text = CALL.replace('"weather"', '"Weather"')
    body: dict[str, Any] = {"model": "fake", "messages": [HELLO], "tools": [openai.pydantic_function_tool(Weather)]}
    async with gateway(answers=["Let me see. " + text]) as it, client_of(it) as client:
        parsed = await client.chat.completions.parse(**body)
        async with client.chat.completions.stream(**body) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    for completion in (parsed, final):
        message = completion.choices[0].message
        assert message.content == "Let me see."
        [call] = message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="París", days=3)
