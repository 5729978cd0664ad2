"""Limits of the configuration, each with its number in the message; and poison beside a long stream."""

import asyncio
import json
import re
import threading
import time
from typing import Any

import pytest

from tests.gateway_server import CHAT, COMPLETION, TIMEOUT_S, Gateway, gateway
from tests.waiting import on_this_machine
from twostroke.cluster.config import LimitsSection, RouterSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.gateway.body import LARGE_BYTES, parse_body

USER = {"role": "user", "content": "Hi"}
ANY: dict[str, Any] = {}


def tools(*parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Functions called a, b, ..."""
    functions = [{"name": chr(97 + index), "parameters": schema} for index, schema in enumerate(parameters)]
    return [{"type": "function", "function": function} for function in functions]


LIMITS: list[tuple[str, int, str, dict[str, Any], dict[str, Any], str]] = [
    # (limit, its value, endpoint, fields at the limit, fields over it, the field that the error names)
    ("max_prompt_tokens", 9, COMPLETION, {"prompt": "x" * 9}, {"prompt": "x" * 10}, "prompt"),
    ("max_prompt_tokens", 9, COMPLETION, {"prompt": [[1] * 9]}, {"prompt": [[1], [1] * 10]}, "prompt[1]"),
    ("max_output_tokens", 9, COMPLETION, {"max_tokens": 9}, {"max_tokens": 10}, "max_tokens"),
    (
        "max_output_tokens",
        9,
        CHAT,
        {"max_completion_tokens": 9},
        {"max_completion_tokens": 10},
        "max_completion_tokens",
    ),
    ("max_choices", 9, CHAT, {"n": 9}, {"n": 10}, "n"),
    ("max_choices", 9, COMPLETION, {"prompt": ["a"] * 9}, {"prompt": ["a"] * 10}, "prompt"),
    ("max_messages", 9, CHAT, {"messages": [USER] * 9}, {"messages": [USER] * 10}, "messages"),
    ("max_stops", 9, COMPLETION, {"stop": ["z"] * 9}, {"stop": ["z"] * 10}, "stop"),
    ("max_stop_characters", 9, COMPLETION, {"stop": "z" * 9}, {"stop": ["a", "z" * 10]}, "stop[1]"),
    ("max_stop_tokens", 9, COMPLETION, {"stop_token_ids": [1] * 9}, {"stop_token_ids": [1] * 10}, "stop_token_ids"),
    ("max_logprobs", 9, COMPLETION, {"logprobs": 9}, {"logprobs": 10}, "logprobs"),
    ("max_logprobs", 9, COMPLETION, {"prompt_logprobs": 9}, {"prompt_logprobs": 10}, "prompt_logprobs"),
    (
        "max_logprobs",
        9,
        CHAT,
        {"logprobs": True, "top_logprobs": 9},
        {"logprobs": True, "top_logprobs": 10},
        "top_logprobs",
    ),
    (
        "max_logit_biases",
        9,
        COMPLETION,
        {"logit_bias": {str(token): 1 for token in range(9)}},
        {"logit_bias": {str(token): 1 for token in range(10)}},
        "logit_bias",
    ),
    ("max_salt_characters", 9, COMPLETION, {"cache_salt": "z" * 9}, {"cache_salt": "z" * 10}, "cache_salt"),
    (
        "max_grammar_characters",
        9,
        CHAT,
        {"structured_outputs": {"regex": "z" * 9}},
        {"structured_outputs": {"regex": "z" * 10}},
        "structured_outputs.regex",
    ),
    ("max_tools", 2, CHAT, {"tools": tools(ANY, ANY)}, {"tools": tools(ANY, ANY, ANY)}, "tools"),
    (
        "max_tool_schema_bytes",
        29,
        CHAT,
        {"tools": tools({"title": "z" * 17})},
        {"tools": tools({}, {"title": "z" * 18})},
        "tools[1].function.parameters",
    ),
]


def base(path: str) -> dict[str, Any]:
    return {"model": "fake", **({"messages": [USER]} if path == CHAT else {"prompt": "x"})}


@pytest.mark.parametrize(("limit", "value", "path", "under", "over", "named"), LIMITS)
async def test_at_the_limit_and_over_it(
    limit: str, value: int, path: str, under: dict[str, Any], over: dict[str, Any], named: str
) -> None:
    async with gateway(RouterSection(limits=LimitsSection.model_validate({limit: value}))) as server:
        assert (await server.post(path, {**base(path), **under})).status_code == 200
        answer = await server.post(path, {**base(path), **over})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == named
    assert re.search(rf"\b{value}\b", error["message"])


def nested(levels: int) -> Any:
    """Lists and objects in turn."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


async def test_depth_counts_levels_not_brackets() -> None:
    async with gateway(RouterSection(limits=LimitsSection(max_json_depth=10))) as server:
        wide = [{"role": "user", "content": [{"type": "text", "text": "[{" * 5}]}] * 3
        assert (await server.post(CHAT, {**base(CHAT), "messages": wide, "max_tokens": 1})).status_code == 200
        # The body is a level, `metadata` the second.
        assert (await server.post(CHAT, {**base(CHAT), "metadata": nested(9) | {}})).status_code == 200
        for levels in (10, 200, 600):
            answer = await server.post(CHAT, {**base(CHAT), "metadata": {"a": nested(levels - 1)}})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "metadata"
            assert "10 levels" in answer.json()["error"]["message"]
        data = b'{"model": "fake", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        answer = await server.client.post(CHAT, content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "10 levels" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/tokenize"])
async def test_as_deep_as_any_configuration_allows(path: str) -> None:
    deep = {"type": "object", "properties": nested(240)}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": deep}}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "f", "parameters": deep}
    elif path == "/v1/messages":
        tool = {"name": "f", "input_schema": deep}
    said = {"input": "Hi"} if path == "/v1/responses" else {"messages": [USER]}
    async with gateway(RouterSection(limits=LimitsSection(max_json_depth=250))) as server:
        most = {"max_tokens": 9} if path == "/v1/messages" else {}
        answer = await server.post(path, {"model": "fake", **said, **most, "tools": [tool]})
        # The fake's context is too small for it, which was found out by writing it down.
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_only_a_large_body_is_understood_in_a_thread() -> None:
    def parse(body: dict[str, object]) -> int:
        if not body:
            raise InvalidRequest("empty")
        return threading.get_ident()

    config = RouterSection()
    assert await parse_body(bytearray(b'{"a": 1}'), parse, config) == threading.get_ident()
    assert await parse_body(bytearray(b'{"a": "' + b"x" * LARGE_BYTES + b'"}'), parse, config) != threading.get_ident()
    for data in (b"{}", b"{}" + b" " * LARGE_BYTES):
        with pytest.raises(InvalidRequest):
            await parse_body(bytearray(data), parse, config)


BIG = b"9" * 400
POISON: list[tuple[str, bytes, str | None]] = [
    # (endpoint, JSON after the fields that are needed, the field that the error names; None: the body as such)
    *(
        (COMPLETION, b'"%s": %s' % (name.encode(), value), name if value in (b'"5"', b"[]", b"{}") else None)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"5"', b"[]", b"{}")
    ),
    *((COMPLETION, b'"%s": 1e308' % name.encode(), name) for name in ("temperature", "top_p", "repetition_penalty")),
    *(
        (COMPLETION, b'"%s": %s' % (name.encode(), value), name)
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "priority")
        for value in (b"1e30", b"1.5", b'"1"', b"true", b"-99999999999999999999", BIG[:19] + b"9")
    ),
    (COMPLETION, b'"seed": ' + BIG, None),
    (COMPLETION, b'"prompt": [1, -1]', "prompt[1]"),
    (COMPLETION, b'"prompt": [[1], [99999999999999999999]]', "prompt[1][0]"),
    (COMPLETION, b'"prompt": [[1], [1, 258]]', "prompt[1][1]"),
    (COMPLETION, b'"prompt": [1, 1e3]', "prompt[1]"),
    (COMPLETION, b'"stop_token_ids": [-1]', "stop_token_ids[0]"),
    (COMPLETION, b'"stop_token_ids": [99999999999999999999]', "stop_token_ids[0]"),
    (COMPLETION, b'"prompt": "\\ud800"', None),
    (COMPLETION, b'"stop": ["\\udc00x"]', None),
    (COMPLETION, b'"cache_salt": "\\ud83d"', None),
    (COMPLETION, b'"user": "\\ud83d"', None),
    (COMPLETION, b'"\\ud83d": 1', None),
    (COMPLETION, b'"prompt": "\xed\xa0\x80"', None),
    (CHAT, b'"messages": [{"role": "user", "content": "\\ud800"}]', None),
    (CHAT, b'"chat_template_kwargs": {"a": NaN}', None),
    (CHAT, b'"chat_template_kwargs": {"a": ' + b"[" * 90 + b"]" * 90 + b"}", "chat_template_kwargs"),
    (CHAT, b'"metadata": ' + b'{"a":' * 90 + b"1" + b"}" * 90, "metadata"),
    (CHAT, b'"messages": ' + b"[" * 5000 + b"]" * 5000, None),
    (CHAT, b'"structured_outputs": {"json": {"$ref": "#"}}', "structured_outputs.json"),
    (CHAT, b'"structured_outputs": {"regex": "' + b"(" * 500 + b'"}', "structured_outputs.regex"),
    (CHAT, b'"structured_outputs": {"regex": "(a{1000}){1000}"}', "structured_outputs.regex"),
    ("/detokenize", b'"tokens": [1, 1e400]', None),
    ("/detokenize", b'"tokens": [99999999999999999999]', "tokens[0]"),
    ("/tokenize", b'"prompt": "\\udfff"', None),
]


def poisoned(path: str, field: bytes) -> bytes:
    """A good body, with one field more, or another value for one that it has."""
    needed = {CHAT: base(CHAT), COMPLETION: base(COMPLETION)}.get(path, {"model": "fake"})
    name = field.split(b'"')[1].decode("latin-1")
    kept = json.dumps({key: value for key, value in needed.items() if key != name})[:-1].encode()
    return kept + b", " + field + b"}"


async def stream_beside(server: Gateway, poison: bool) -> bytes:
    """All events of one long stream; with `poison`, all of the table comes while it waits in the middle."""
    body = {"model": "fake", "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "seed": 1, "stream": True}
    server.generator.released.clear()
    async with (
        server.open(COMPLETION, body, "x-request-id: long", "connection: close") as (reader, _),
        asyncio.timeout(60),
    ):
        data = await reader.readuntil(b"\r\n\r\n")
        data = await reader.readuntil(b"\n\n")
        if poison:
            for path, field, named in POISON:
                await refused(server, path, field, named)
        server.generator.release()
        return re.sub(rb'"created":\d+', b"", data + await reader.read())


async def refused(server: Gateway, path: str, field: bytes, named: str | None) -> None:
    started = time.monotonic()
    headers = {"content-type": "application/json"}
    answer = await server.client.post(path, content=poisoned(path, field), headers=headers, timeout=TIMEOUT_S)
    case = (path, field[:80], answer.text)
    assert time.monotonic() - started < on_this_machine(1.0), case
    assert answer.status_code == 400, case
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500, case
    if named is not None:
        assert error["param"] == named, case


async def test_poison_beside_a_long_stream_changes_no_byte_of_it() -> None:
    async with gateway(answers=["The naïve café 🙂 serves tea. "], hold_at=100) as server:
        await server.gate.open()  # as a router does when it starts
        alone = await stream_beside(server, poison=False)
        beside = await stream_beside(server, poison=True)
        assert alone == beside
        assert b"[DONE]" in alone
        assert len(server.generator.submitted) == 2
