"""The child that compiles what nobody has vouched for: verdicts, and what it dies of."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from tests.waiting import on_this_machine
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.router.grammar_gate import GrammarGate

FIELD = "response_format"
POISON = "(a{1000}){1000}"
CATASTROPHIC = Grammar(GrammarKind.REGEX, POISON)
WORD = {"type": "string", "pattern": POISON}
HIDDEN = {
    "a property": {"type": "object", "properties": {"a": WORD}, "required": ["a"]},
    "one that may be left out": {"type": "object", "properties": {"first": {"type": "string"}, "a": WORD}},
    "a definition": {"$defs": {"word": WORD}, "type": "array", "items": {"$ref": "#/$defs/word"}},
    "one way of several": {"anyOf": [{"type": "integer"}, {"type": "array", "prefixItems": [{"type": "null"}, WORD]}]},
    "names of properties": {"type": "object", "patternProperties": {POISON: {}}},
}
RARE = {
    "an expression": f'start: "a" | "b" "c" /{POISON}/',
    "a terminal": 'start: "a" | "b" "c" MANY\nMANY: SOME{1000}\nSOME: /a{1000}/',
    "a schema": f'start: "a" | "b" "c" %json {json.dumps(WORD)}',
}


@pytest.fixture
async def gate() -> AsyncIterator[GrammarGate]:
    gate = GrammarGate()
    yield gate
    await gate.close()


async def test_good_and_bad_grammars(gate: GrammarGate) -> None:
    await gate.check(ANY_OBJECT, FIELD)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="Invalid type") as caught:
            await gate.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type":"x"}'), FIELD)
        assert caught.value.field == FIELD


async def test_what_takes_too_long_is_refused_and_the_next_is_not_harmed(gate: GrammarGate) -> None:
    await gate.check(ANY_OBJECT, FIELD)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="too complex"):
        await gate.check(CATASTROPHIC, FIELD)
    assert time.monotonic() - began < on_this_machine(1.0)
    await gate.check(Grammar(GrammarKind.REGEX, "a+"), FIELD)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="too complex"):
        await gate.check(CATASTROPHIC, FIELD)
    assert time.monotonic() - began < on_this_machine(0.1), "the verdict was not kept"


@pytest.mark.parametrize(
    "grammar",
    [
        *(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in HIDDEN.values()),
        *(Grammar(GrammarKind.GRAMMAR, text) for text in RARE.values()),
    ],
    ids=[*HIDDEN, *RARE],
)
async def test_what_an_answer_may_never_get_to_is_tried_too(gate: GrammarGate, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="too complex|too many"):
        await gate.check(grammar, FIELD)


async def test_a_client_that_leaves_takes_no_verdict_of_another(gate: GrammarGate) -> None:
    leaving = asyncio.create_task(gate.check(CATASTROPHIC, FIELD))
    done, _ = await asyncio.wait([leaving], timeout=0.05)
    assert not done
    leaving.cancel()
    await gate.check(ANY_OBJECT, FIELD)
    with pytest.raises(InvalidRequest, match="unclosed"):
        await gate.check(Grammar(GrammarKind.REGEX, "(a"), FIELD)


async def test_grammars_at_once(gate: GrammarGate) -> None:
    grammars = [Grammar(GrammarKind.REGEX, "a" * size) for size in range(1, 21)]
    await asyncio.gather(*(gate.check(grammar, FIELD) for grammar in grammars))


async def test_closing_twice() -> None:
    gate = GrammarGate()
    await gate.close()
    await gate.check(ANY_OBJECT, FIELD)
    await gate.close()
    await gate.close()
