"""Grammars over the fake's vocabulary of bytes: what they allow, and what is wrong with those that cannot be used."""

import json

import pytest

from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.engine.grammar import MAX_DEPTH, MAX_TEXT, GrammarCompiler, GrammarError
from twostroke.engine.grammar_child import find_fault
from twostroke.engine.plan import ConstraintBroken
from twostroke.engine.vocabulary import Vocabulary, byte_vocabulary

END = 257
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object, *, compact: bool = False) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), compact)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary)


def allowed(compiler: GrammarCompiler, grammar: Grammar, text: str) -> set[int]:
    bits = compiler.compile(grammar).mask(text.encode(), (END,))
    return {token for token in range(258) if bits[token >> 3] >> (token & 7) & 1}


@pytest.mark.parametrize(
    ("grammar", "text", "wanted"),
    [
        (Grammar(GrammarKind.REGEX, "[ab]{2}c"), "", {97, 98}),
        (Grammar(GrammarKind.REGEX, "[ab]{2}c"), "ab", {99}),
        (Grammar(GrammarKind.REGEX, "[ab]{2}c"), "abc", {END}),
        (Grammar(GrammarKind.REGEX, "a*"), "a", {97, END}),
        (Grammar(GrammarKind.CHOICE, '["yes", "yes!", "n(o"]'), "yes", {ord("!"), END}),
        (Grammar(GrammarKind.CHOICE, '["yes", "yes!", "n(o"]'), "n", {ord("(")}),
        (Grammar(GrammarKind.CHOICE, '["\u00e9"]'), "", {0xC3}),
        (Grammar(GrammarKind.GRAMMAR, 'start: "a" start "b" | "c"'), "aac", {ord("b")}),
        (Grammar(GrammarKind.GRAMMAR, 'root ::= "a" root | "b"'), "aab", {END}),
        (schema(PERSON, compact=True), '{"name":"x",', {ord('"')}),
        (schema(PERSON, compact=True), '{"name":"x","age":7}', {END}),
        (ANY_OBJECT, "", {ord("{")}),
    ],
    ids=str,
)
def test_what_may_follow(compiler: GrammarCompiler, grammar: Grammar, text: str, wanted: set[int]) -> None:
    assert allowed(compiler, grammar, text) == wanted


def test_white_space_where_it_is_not_compact(compiler: GrammarCompiler) -> None:
    assert ord(" ") in allowed(compiler, schema(PERSON), "{")
    assert ord(" ") not in allowed(compiler, schema(PERSON, compact=True), "{")


def test_a_state_rebuilt_from_the_output_gives_the_same_masks(compiler: GrammarCompiler) -> None:
    text = b'{"name": "a\\n\xc3\xa9", "age": -12}'
    state = compiler.compile(schema(PERSON))
    for cut in range(len(text) + 1):
        assert state.mask(text[:cut], (END,)) == compiler.compile(schema(PERSON)).mask(text[:cut], (END,))


def test_states_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    one, other = compiler.compile(ANY_OBJECT), compiler.compile(ANY_OBJECT)
    one.mask(b'{"a":1}', (END,))
    assert other.mask(b"", (END,)) == compiler.compile(ANY_OBJECT).mask(b"", (END,))


def test_an_output_that_does_not_fit_is_broken(compiler: GrammarCompiler) -> None:
    with pytest.raises(ConstraintBroken):
        compiler.compile(ANY_OBJECT).mask(b"[", (END,))


def test_a_vocabulary_that_cannot_say_it_is_broken() -> None:
    poor = GrammarCompiler(lambda: Vocabulary([b"a", b"b", b""]))
    with pytest.raises(ConstraintBroken, match="grammar"):
        poor.compile(Grammar(GrammarKind.REGEX, "c")).mask((), (2,))


def test_ends_past_the_vocabulary_are_left_out(compiler: GrammarCompiler) -> None:
    bits = compiler.compile(Grammar(GrammarKind.REGEX, "a*")).mask((), (END, 5000))
    assert len(bits) * 8 >= 258


MANY_WAYS = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}})
NEEDS_ITSELF = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "required": ["next"],
    "additionalProperties": False,
}
DEEP = "[" * MAX_DEPTH + "0" + "]" * MAX_DEPTH
BAD = {
    "not JSON": Grammar(GrammarKind.JSON_SCHEMA, "{"),
    "no object": Grammar(GrammarKind.JSON_SCHEMA, "[]"),
    "an unknown type": schema({"type": "strin"}),
    "a keyword that is not enforced": schema({"not": {"type": "string"}}),
    "nothing fits": schema({"type": "integer", "minimum": 2, "maximum": 1}),
    "itself": schema({"$ref": "#"}),
    "each other": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    "a list without an end": schema(NEEDS_ITSELF),
    "no number": Grammar(GrammarKind.JSON_SCHEMA, '{"minimum":NaN}'),
    "too large a number": Grammar(GrammarKind.JSON_SCHEMA, '{"minimum":1e999}'),
    "half a character": Grammar(GrammarKind.JSON_SCHEMA, '{"const":"\\ud800"}'),
    "too many ways": Grammar(GrammarKind.JSON_SCHEMA, MANY_WAYS),
    "elsewhere": schema({"$ref": "https://example.com/schema"}),
    "too deep": Grammar(GrammarKind.JSON_SCHEMA, '{"enum":[' + DEEP + "]}"),
    "deeper than JSON goes": Grammar(GrammarKind.JSON_SCHEMA, "[" * 30000),
    "too long": schema({"enum": ["x" * MAX_TEXT]}),
    "no regex": Grammar(GrammarKind.REGEX, "(a"),
    "look-ahead": Grammar(GrammarKind.REGEX, "(?=a)b"),
    "a back-reference": Grammar(GrammarKind.REGEX, r"(a)\1"),
    "brackets": Grammar(GrammarKind.REGEX, "(" * 70 + "a" + ")" * 70),
    "no choices": Grammar(GrammarKind.CHOICE, "[]"),
    "choices of another kind": Grammar(GrammarKind.CHOICE, '["a", 1]'),
    "no rule": Grammar(GrammarKind.GRAMMAR, "start: b"),
    "a control token": Grammar(GrammarKind.GRAMMAR, "start: <|im_end|>"),
    "no grammar": Grammar(GrammarKind.GRAMMAR, "\x00"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_told_what_is_wrong(compiler: GrammarCompiler, name: str) -> None:
    fault = find_fault(compiler, BAD[name])
    assert fault
    assert "\n" not in fault
    assert len(fault) < 400
    assert "panic" not in fault


def test_the_first_compilation_of_a_bad_grammar_raises(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="Invalid type"):
        compiler.compile(BAD["an unknown type"])


@pytest.mark.parametrize(
    "grammar",
    [
        schema(PERSON),
        schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
        schema({"type": "string", "description": "(" * 200}),
        ANY_OBJECT,
    ],
    ids=["plain", "a tree", "brackets in words", "any object"],
)
def test_a_good_grammar_has_no_fault(compiler: GrammarCompiler, grammar: Grammar) -> None:
    assert find_fault(compiler, grammar) == ""
