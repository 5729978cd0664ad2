"""Class E's poison at `/v1/responses` and `/v1/messages`: a 4xx in the API's own form, and a stream beside is whole."""

import json
from typing import Any

import pytest

from tests.gateway_server import events_of, gateway
from twostroke.cluster.config import RouterSection

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "Hi"}
BASES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "fake", "input": "Hi"},
    MESSAGES: {"model": "fake", "messages": [HI], "max_tokens": 50},
}
ANSWER = "Hello, wörld! 🙂"
HUGE = "9" * 400

EVERYWHERE: dict[str, list[str]] = {
    "temperature": ["NaN", "Infinity", "1e999", "-1", '"1"', "true", "[1]", '{"a": 1}'],
    "top_p": ["0", "-1", "2", "1e400"],
    "top_k": ["2.5", "-2", "true", HUGE],
    "seed": [HUGE, '"7"', "1.5"],
    "timeout": ["0", "-1", "NaN", '"1"'],
    "stream": ['"true"', "1"],
    "cache_salt": [f'"{"x" * 1000}"', "5", r'"\ud800"'],
    "metadata": ["[" * 100 + "]" * 100, '{"a":' * 2000 + "1" + "}" * 2000],
}
"""Field to what is refused there, as it is written: not all of it is JSON as RFC 8259 has it."""
LIMITS = ["0", "-1", "1.5", '"5"', "true", HUGE, "1000000"]
CHATS: list[tuple[str, object]] = [
    ("", [HI] * 10_000),
    ("[0].content", [{"role": "user", "content": None}]),
    ("[0].content", [{"role": "user", "content": []}]),
    ("[0].role", [{"role": ["user"], "content": "x"}]),
    ("[0].content[0].type", [{"role": "user", "content": [[]]}]),
    ("[0].content[0].type", [{"role": "user", "content": [{"type": {}}]}]),
    ("[0].nonsense", [{**HI, "nonsense": 1}]),
]
"""Where the conversation is wrong, and the conversation."""


def poison(path: str) -> list[tuple[str, str, str]]:
    """(field that is set, what to, field that the refusal names)"""
    limit, chat = ("max_output_tokens", "input") if path == RESPONSES else ("max_tokens", "messages")
    found = [(name, value, name) for name, values in {**EVERYWHERE, limit: LIMITS}.items() for value in values]
    found += [(chat, json.dumps(value), chat + place) for place, value in CHATS]
    found.append(("x" * 5000, "1", "x" * 128))
    if path == MESSAGES:
        found += [
            ("stop_sequences", json.dumps(["x"] * 10_000), "stop_sequences"),
            ("stop_sequences", json.dumps(["x" * 100_000]), "stop_sequences[0]"),
        ]
    return found


def body_of(path: str, field: str, value: str) -> str:
    rest = json.dumps({name: kept for name, kept in BASES[path].items() if name != field})
    return f'{rest[:-1]}, "{field}": {value}}}'


@pytest.mark.parametrize("path", BASES)
async def test_poison_is_refused_and_harms_no_bystander(path: str) -> None:
    bystander = {**BASES[MESSAGES], "stream": True}
    async with (
        gateway(answers=[ANSWER], hold_at=3) as server,
        server.client.stream("POST", MESSAGES, json=bystander) as stream,
    ):
        pieces = stream.aiter_text()
        text = await anext(pieces)
        for field, value, named in poison(path):
            answer = await server.client.post(
                path, content=body_of(path, field, value), headers={"content-type": "application/json"}
            )
            shown = (field[:80], value[:80], answer.text)
            assert answer.status_code == 400, shown
            error = answer.json()["error"]
            assert ("type" in answer.json()) == (path == MESSAGES), shown
            # What is no JSON, or too deep to be read at all, is refused as a whole.
            assert error["param"] == named or (error["param"] is None and "the body is" in error["message"]), shown
        server.generator.release()
        text += "".join([piece async for piece in pieces])
        assert len(server.generator.submitted) == 1
    told = [data["delta"]["text"] for name, data in events_of(text) if name == "content_block_delta"]
    assert "".join(told) == ANSWER


@pytest.mark.parametrize("path", BASES)
async def test_a_body_over_the_limit_is_refused_in_the_form_of_its_api(path: str) -> None:
    async with gateway(RouterSection(max_body_bytes=1000)) as server:
        answer = await server.post(path, {**BASES[path], "metadata": {"a": "x" * 2000}})
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == ("request_too_large" if path == MESSAGES else "invalid_request_error")
