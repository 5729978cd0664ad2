"""The OpenAPI document against what is really taken and answered."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.gateway_server import CHAT, COMPLETION, events, events_of, gateway
from twostroke.cluster.core.errors import PeerLost
from twostroke.router.tokenizer import ByteTokenizer
from twostroke.router.tool_calls import ChatStyle

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
COUNT = f"{MESSAGES}/count_tokens"
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object"}, "strict": True}}
FLAT = {"type": "json_schema", "name": "it", "schema": {"type": "object"}, "strict": True}
BARE = {"type": "json_schema", "schema": {"type": "object"}}
COMPACT = {"disable_any_whitespace": True}
USER = {"role": "user", "content": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True, "description": None}}]
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "x", "tool_call_id": "a"},
]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
CUSTOM = {"name": "f", "input_schema": {"type": "object"}}
ITEMS = [
    USER,
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]
TURNS = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "fake", "messages": [USER], "max_tokens": 2}),
    (CHAT, {"model": "fake", "messages": [USER], "n": 2, "stop": ["x"], "user": "u", "store": False, "metadata": {}}),
    (CHAT, {"model": "fake", "messages": [USER], "temperature": None, "logprobs": False, "tools": [], "seed": None}),
    (CHAT, {"model": "fake", "messages": [USER], "continue_final_message": True, "chat_template_kwargs": {"a": 1}}),
    (CHAT, {"model": "fake", "messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER]}),
    (COMPLETION, {"model": "fake", "prompt": ["a", "b"], "echo": True, "best_of": 1, "max_tokens": 2}),
    (COMPLETION, {"model": "fake", "prompt": [[1, 2], [3]], "n": 2, "priority": -1, "cache_salt": "s"}),
    (COMPLETION, {"model": "fake", "prompt": [1, 2], "stop": "x", "stop_token_ids": [5], "timeout": 5}),
    (CHAT, {"model": "fake", "messages": [USER], "logprobs": True, "top_logprobs": 2, "max_tokens": 2}),
    (CHAT, {"model": "fake", "messages": [USER], "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": None}),
    (CHAT, {"model": "fake", "messages": HISTORY, "tools": TOOLS, "tool_choice": NAMED, "logprobs": True}),
    (CHAT, {"model": "fake", "messages": [USER], "tools": TOOLS, "tool_choice": ALLOWED, "stream": False}),
    (COMPLETION, {"model": "fake", "prompt": ["a", "bc"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 2}),
    (RESPONSES, {"model": "fake", "input": "Hi", "max_output_tokens": 2, "instructions": "x", "metadata": {"a": "b"}}),
    (RESPONSES, {"model": "fake", "input": [USER], "store": False, "tools": [], "user": "u", "temperature": None}),
    (RESPONSES, {"model": "fake", "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    (RESPONSES, {"model": "fake", "input": "Hi", "text": {"format": FLAT}}),
    (RESPONSES, {"model": "fake", "input": "Hi", "text": {"format": {"type": "json_object"}, "verbosity": "medium"}}),
    (INPUT_TOKENS, {"model": "fake", "input": "Hi", "text": {"format": FLAT}}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 50, "output_config": {"format": BARE}}),
    (COUNT, {"model": "fake", "messages": [USER], "output_config": {"format": BARE}}),
    (
        RESPONSES,
        {"model": "fake", "input": ITEMS, "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    ),
    (INPUT_TOKENS, {"model": "fake", "input": ITEMS, "tools": [FUNCTION], "parallel_tool_calls": False}),
    (
        MESSAGES,
        {"model": "fake", "messages": TURNS, "max_tokens": 50, "tools": [CUSTOM], "tool_choice": {"type": "any"}},
    ),
    (COUNT, {"model": "fake", "messages": TURNS, "tools": [CUSTOM]}),
    (INPUT_TOKENS, {"model": "fake", "input": "Hi", "instructions": "x", "tools": None}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 2, "system": "x", "metadata": {"user_id": "u"}}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 50, "stop_sequences": ["wor"], "top_k": 5}),
    (COUNT, {"model": "fake", "messages": [USER], "tools": []}),
    (CHAT, {"model": "fake", "messages": [USER], "response_format": FORMAT, "structured_outputs": COMPACT}),
    (COMPLETION, {"model": "fake", "prompt": "x", "response_format": {"type": "json_object"}}),
    (COMPLETION, {"model": "fake", "prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"model": "fake", "messages": [USER]}),
    ("/detokenize", {"tokens": [1, 2]}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "fake"}),
    (CHAT, {"messages": [USER]}),
    (CHAT, {"model": "fake", "messages": []}),
    (CHAT, {"model": "fake", "messages": [{**USER, "role": "wizard"}]}),
    (CHAT, {"model": "fake", "messages": [{"role": "assistant", "content": None}]}),
    (CHAT, {"model": "fake", "messages": [USER], "temprature": 1}),
    (CHAT, {"model": "fake", "messages": [USER], "tools": [{"type": "web_search"}]}),
    (CHAT, {"model": "fake", "messages": [USER], "tools": TOOLS, "tool_choice": "any"}),
    (CHAT, {"model": "fake", "messages": [USER], "store": True}),
    (CHAT, {"model": "fake", "messages": [USER], "max_tokens": "5"}),
    (CHAT, {"model": "fake", "messages": [USER], "response_format": {"type": "yaml"}}),
    (COMPLETION, {"model": "fake", "prompt": "x", "structured_outputs": {"choice": []}}),
    (COMPLETION, {"model": "fake", "prompt": "x", "suffix": "y"}),
    (COMPLETION, {"model": "fake", "prompt": {"a": 1}}),
    (COMPLETION, {"model": "fake", "prompt": "x", "n": 0}),
    (COMPLETION, {"model": "fake", "prompt": "x", "temperature": 3}),
    (COMPLETION, {"model": "fake", "prompt": "x", "top_p": 0}),
    (RESPONSES, {"model": "fake"}),
    (RESPONSES, {"model": "fake", "input": []}),
    (RESPONSES, {"model": "fake", "input": "x", "store": True}),
    (RESPONSES, {"model": "fake", "input": "x", "max_tokens": 5}),
    (RESPONSES, {"model": "fake", "input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    (INPUT_TOKENS, {"model": "fake", "input": "x", "previous_response_id": "resp_1"}),
    (MESSAGES, {"model": "fake", "messages": [USER]}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 0}),
    (MESSAGES, {"model": "fake", "messages": [{**USER, "role": "system"}], "max_tokens": 5}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 5, "tools": [{"name": "f"}]}),
    (RESPONSES, {"model": "fake", "input": [{"type": "function_call", "call_id": "a"}]}),
    (RESPONSES, {"model": "fake", "input": "x", "tools": [{"type": "web_search"}]}),
    (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 5, "tool_choice": "auto"}),
    (COUNT, {"model": "fake", "messages": [USER], "max_tokens": 5}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": "x"}),
]


def check(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({"components": document["components"], **schema}).validate(value)


def request_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


async def test_good_bodies_and_their_answers_are_described() -> None:
    answer = '<think>hm</think>Yes.<tool_call>{"name": "f"}</tool_call>'
    tokenizer = ByteTokenizer(style=ChatStyle(marks_reasoning=True))
    async with gateway(tokenizer=tokenizer, answers=[answer]) as server:
        document = (await server.client.get("/openapi.json")).json()
        for path, body in GOOD:
            check(document, request_schema(document, path), body)
            answer = await server.post(path, body)
            assert answer.status_code == 200, (path, body, answer.text)
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            check(document, content["application/json"]["schema"], answer.json())
            if path in (RESPONSES, MESSAGES):
                kind = "ResponseEvent" if path == RESPONSES else "MessageEvent"
                streamed = await server.post(path, {**body, "stream": True}, x_twostroke_report="1")
                for _, event in events_of(streamed.text):
                    check(document, {"$ref": f"#/components/schemas/{kind}"}, event)
            elif "text/event-stream" in content:
                kind = "ChatCompletionChunk" if path == CHAT else "Completion"
                options = {"stream": True, "stream_options": {"include_usage": True}}
                streamed = await server.post(path, {**body, **options}, x_twostroke_report="1")
                for chunk in events(streamed.text)[:-1]:
                    check(document, {"$ref": f"#/components/schemas/{kind}"}, chunk)


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_what_the_document_excludes_is_refused_as_it_says(path: str, body: dict[str, Any]) -> None:
    async with gateway() as server:
        document = (await server.client.get("/openapi.json")).json()
        assert not Draft202012Validator(
            {"components": document["components"], **request_schema(document, path)}
        ).is_valid(body)
        answer = await server.post(path, body)
        assert answer.status_code == 400
        form = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert form["$ref"].endswith("MessageError" if path.startswith(MESSAGES) else "Error")
        check(document, form, answer.json())


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (RESPONSES, {"model": "fake", "input": "Hi"}, "ResponseEvent"),
        (MESSAGES, {"model": "fake", "messages": [USER], "max_tokens": 50}, "MessageEvent"),
    ],
)
async def test_the_events_of_a_failure_are_described(path: str, body: dict[str, Any], kind: str) -> None:
    async with gateway(failure=PeerLost("gone"), fail_at=3) as server:
        document = (await server.client.get("/openapi.json")).json()
        streamed = await server.post(path, {**body, "stream": True})
    for _, event in events_of(streamed.text):
        check(document, {"$ref": f"#/components/schemas/{kind}"}, event)


async def test_every_route_is_described_and_every_reference_leads_somewhere() -> None:
    async with gateway() as server:
        document = (await server.client.get("/openapi.json")).json()
        for path in ("/v1/models", "/v1/models/fake", "/health/live", "/health/ready"):
            described = path.replace("/fake", "/{model}")
            schema = document["paths"][described]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            check(document, schema, (await server.client.get(path)).json())
    assert document["openapi"].startswith("3.2")
    assert set(document["paths"]) == {
        *(
            CHAT,
            COMPLETION,
            RESPONSES,
            INPUT_TOKENS,
            MESSAGES,
            COUNT,
            "/tokenize",
            "/detokenize",
            "/v1/models",
            "/v1/models/{model}",
        ),
        *("/health/live", "/health/ready", "/metrics"),
    }
    names = document["components"]["schemas"]
    Draft202012Validator.check_schema({"$defs": names})
    references = [text.split('"')[0] for text in str(document).replace("'", '"').split("#/components/schemas/")[1:]]
    assert set(references) <= set(names)
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
