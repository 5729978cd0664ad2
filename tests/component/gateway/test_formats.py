"""`response_format` and `structured_outputs` over HTTP: what reaches the generator, what is refused by its name."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.gateway_server import CHAT, COMPLETION, gateway
from tests.waiting import on_this_machine
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
NEEDS_ITSELF = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
COMPACT = "structured_outputs.disable_any_whitespace"
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def formatted(schema: object, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **fields}}}


GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (formatted(SCHEMA, strict=True), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))),
    (formatted(None), ANY_OBJECT),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")), compact=True),
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    (
        {**formatted(SCHEMA), "structured_outputs": {"disable_any_whitespace": True}},
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")), compact=True),
    ),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "\u00e9"]}}, Grammar(GrammarKind.CHOICE, '["a","\u00e9"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
]


async def test_what_is_asked_for_reaches_the_generator() -> None:
    async with gateway() as it:
        for extra, grammar in GOOD:
            answer = await it.post(CHAT, {**CHAT_BODY, **extra})
            assert answer.status_code == 200, answer.text
            assert it.generator.submitted[-1].sampling.grammar == grammar
        answer = await it.post(COMPLETION, {"model": "fake", "prompt": "x", **formatted(SCHEMA)})
        assert answer.status_code == 200
        assert it.generator.submitted[-1].sampling.grammar is not None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (formatted([]), "response_format.json_schema.schema"),
    (formatted({"type": "strin"}), "response_format.json_schema.schema"),
    (formatted({"$ref": "#"}), "response_format.json_schema.schema"),
    (formatted({"enum": ["x" * 70000]}), "response_format.json_schema.schema"),
    (formatted(SCHEMA, strict="yes"), "response_format.json_schema.strict"),
    (formatted(SCHEMA, other=1), "response_format.json_schema.other"),
    ({**formatted(SCHEMA), "ignore_eos": True}, "ignore_eos"),
    ({**formatted(SCHEMA), "min_tokens": 3}, "min_tokens"),
    ({**formatted(SCHEMA), "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({**formatted(SCHEMA), "structured_outputs": {"disable_any_whitespace": 1}}, COMPACT),
    (formatted(NEEDS_ITSELF), "response_format.json_schema.schema"),
    (formatted({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}), "response_format.json_schema.schema"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
    ({"structured_outputs": {"json": '{"minimum":NaN}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"const":"\\ud800"}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 500 + "]" * 500}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"not":' * 300 + "{}" + "}" * 300}}, "structured_outputs.json"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
    ({"guided_json": {}}, "guided_json"),
]


async def test_what_cannot_be_done_is_refused_by_its_name() -> None:
    async with gateway() as it:
        # A router starts the process that tries grammars before it serves.
        await it.gate.check(Grammar(GrammarKind.REGEX, "a"), "regex")
        for extra, field in BAD:
            answer = await it.post(CHAT, {**CHAT_BODY, **extra})
            assert answer.status_code == 400, (extra, answer.text)
            assert answer.json()["error"]["param"] == field
            assert answer.elapsed.total_seconds() < on_this_machine(1.0), extra
        assert not it.generator.submitted
        assert (await it.post(CHAT, CHAT_BODY)).status_code == 200


@pytest.mark.parametrize(("depth", "field"), [(50, ".json_schema.schema"), (100, ""), (900, "")])
async def test_a_deep_schema_is_refused(depth: int, field: str) -> None:
    """By the bound of a body's depth, which names the outermost field, or by what a schema cannot be."""
    text = '{"not":' * depth + "{}" + "}" * depth
    body = '{"model":"fake","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
    body += f'"json_schema":{{"name":"x","schema":{text}}}}}}}'
    async with gateway() as it:
        answer = await it.client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"response_format{field}"


class Pet(BaseModel):
    """As an application declares it."""

    name: str = Field(max_length=8, description="What it listens to (if at all)")
    kind: Literal["cat", "dog"]
    friends: list["Pet"]


async def test_the_openai_package_parses() -> None:
    async with gateway(answers=['{"name": "Tom", "kind": "cat", "friends": []}']) as it:
        client = openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0)
        messages: Any = CHAT_BODY["messages"]
        answer = await client.chat.completions.parse(model="fake", messages=messages, response_format=Pet)
        assert answer.choices[0].message.parsed == Pet(name="Tom", kind="cat", friends=[])
        async with client.chat.completions.stream(model="fake", messages=messages, response_format=Pet) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Pet(name="Tom", kind="cat", friends=[])
        await client.close()
    assert it.generator.submitted[0].sampling.grammar is not None
