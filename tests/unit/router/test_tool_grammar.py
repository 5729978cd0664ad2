"""Grammars of tool calls: what they allow parses and validates, and nothing else is allowed."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.vocabulary import byte_vocabulary
from twostroke.router.answer_parts import Parsed, gather
from twostroke.router.tool_calls import ChatStyle, ToolFormat, make_parser
from twostroke.router.tools import ToolAsk, read_tools

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "log", "parameters": {"properties": {"x": {}}}}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
END = 257
COMPILER = GrammarCompiler(byte_vocabulary)


def asked(choice: object, parallel: bool | None = None) -> ToolAsk:
    return read_tools(TOOLS, choice, parallel, LimitsSection())


def grammar(ask: ToolAsk, format: ToolFormat, answer: dict[str, Any] | None = None) -> Grammar:
    form = None if answer is None else Grammar(GrammarKind.JSON_SCHEMA, json.dumps(answer))
    found = ask.grammar(format, form)
    assert found is not None
    return found


def parse(format: ToolFormat, text: str, ask: ToolAsk) -> Parsed:
    parser = make_parser(ChatStyle(format), ask.names, max_calls=ask.max_calls)
    return gather([*parser.push(text), *parser.finish()])


def drawn(found: Grammar, seed: int) -> str:
    """A text that it allows, a byte at a time, ended where it may be."""
    state, random, output = COMPILER.compile(found), Random(seed), list[int]()
    while True:
        bits = state.mask(output, (END,))
        allowed = [token for token in range(256) if bits[token >> 3] >> (token & 7) & 1]
        if bits[END >> 3] >> (END & 7) & 1:
            return bytes(output).decode()
        short = [token for token in allowed if token in b'"}], \n<']
        output.append(random.choice(short if short and len(output) > 300 else allowed))


def allows(found: Grammar, text: str) -> bool:
    """The whole text, and an end after it."""
    state, output = COMPILER.compile(found), list[int]()
    for token in (*text.encode(), END):
        bits = state.mask(output, (END,))
        if not bits[token >> 3] >> (token & 7) & 1:
            return False
        output.append(token)
    return True


def called(format: ToolFormat, *bodies: str) -> str:
    match format:
        case ToolFormat.HERMES:
            return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        case ToolFormat.LLAMA:
            return "; ".join(bodies).replace('"arguments"', '"parameters"')
        case ToolFormat.MISTRAL:
            return f"[TOOL_CALLS][{', '.join(bodies)}]"


GOOD = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
NOW = '{"name": "now", "arguments": {}}'
LOG = '{"name": "log", "arguments": {"x": [1, "a"]}}'
BAD = '{"name": "weather", "arguments": {"city": "Rome", "days": 30}}'
UNKNOWN = '{"name": "rain", "arguments": {}}'


@pytest.mark.parametrize("format", ToolFormat)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_parses_and_validates(format: ToolFormat, choice: object) -> None:
    ask = asked(choice)
    found = grammar(ask, format)
    for seed in range(10):
        parsed = parse(format, drawn(found, seed), ask)
        assert parsed.content == ""
        assert parsed.calls
        for call in parsed.calls:
            arguments = json.loads(call.arguments)
            assert call.name in ask.names
            if call.name == "weather":
                jsonschema.validate(arguments, WEATHER)


@pytest.mark.parametrize("format", ToolFormat)
def test_what_forced_calls_may_be(format: ToolFormat) -> None:
    many, one, named = (grammar(ask, format) for ask in (asked("required"), asked("required", False), asked(NAMED)))
    for found in (many, one, named):
        assert allows(found, called(format, GOOD))
        for text in (called(format, BAD), called(format, UNKNOWN), "", "Well.", "Well. " + called(format, GOOD)):
            assert not allows(found, text)
    assert allows(many, called(format, LOG))
    assert not allows(named, called(format, LOG))
    two = called(format, GOOD, NOW)
    assert allows(many, two) == (format is not ToolFormat.LLAMA)
    assert not allows(one, two)


@pytest.mark.parametrize("format", ToolFormat)
def test_strict_functions_are_enforced_in_free_text(format: ToolFormat) -> None:
    many, one = grammar(asked(None), format), grammar(asked(None, False), format)
    before = "" if format is ToolFormat.LLAMA else "Let me see: [1] <a> "
    for found in (many, one):
        for body in (GOOD, NOW, LOG):
            assert allows(found, before + called(format, body))
        for text in ("", "Well.", "a { b <tool_ [TOOL", "<think>\nhm\n</think>\n\nYes."):
            assert allows(found, text)
        for body in (BAD, UNKNOWN):
            assert not allows(found, before + called(format, body))
    if format is not ToolFormat.LLAMA:
        assert allows(many, called(format, GOOD, NOW))
        assert allows(many, called(format, GOOD) + " and " + called(format, NOW))
        assert not allows(one, called(format, GOOD, NOW))


@pytest.mark.parametrize("format", ToolFormat)
def test_calls_or_json_of_a_schema(format: ToolFormat) -> None:
    found = grammar(asked(None), format, ANSWER)
    for text in (called(format, GOOD), called(format, LOG), '{"n": 3}'):
        assert allows(found, text)
    for text in (called(format, BAD), '{"n": "x"}', "Well.", ""):
        assert not allows(found, text)
    assert allows(grammar(asked(None), format, json.loads(ANY_OBJECT.text)), '{"city": ["Rome"]}')


def test_nothing_is_enforced_that_nobody_asked_for() -> None:
    lax = read_tools(TOOLS[1:], None, None, LimitsSection())
    assert lax.grammar(ToolFormat.HERMES, None) is None
    assert lax.schemas == []
    assert asked("none").grammar(ToolFormat.HERMES, ANY_OBJECT) is None
    assert [schema.field for schema in asked(None).schemas] == ["tools[0].function.parameters"]
    assert len(asked("required").schemas) == 3
