"""Where a grammar has words of its own, and where what looks like one is something else."""

import json

import pytest

from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.engine.grammar_words import words_of


def patterns(schema: object) -> list[str]:
    words = words_of(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    return [json.loads(word.text)["pattern"] for word in words]


def test_patterns_of_a_schema() -> None:
    schema = {
        "properties": {
            "pattern": {"type": "string", "pattern": "a|b"},
            "again": {"pattern": "a|b"},
            "list": {"items": [{"patternProperties": {"c": {"pattern": "d"}}}]},
        },
        "default": {"pattern": "x"},
        "enum": [{"pattern": "y"}],
        "const": {"pattern": "z"},
        "examples": [{"pattern": "w"}],
    }
    assert patterns(schema) == ["^(?:a|b)$", "^(?:c)$", "^(?:d)$"]


@pytest.mark.parametrize("schema", [True, {}, {"pattern": 1}, {"patternProperties": []}, {"type": "string"}])
def test_a_schema_without(schema: object) -> None:
    assert patterns(schema) == []


def test_words_of_lark() -> None:
    text = r"""start: "/no/" /one\/[a]/ rule | "\"" /two/ // comment /no/
rule: %json {"pattern": "three", "const": "/no/"} WORD
WORD: "x" /two/
"""
    expressions = [word for word in words_of(Grammar(GrammarKind.GRAMMAR, text)) if word.kind is GrammarKind.REGEX]
    assert [word.text for word in expressions] == [r"one\/[a]", "two"]
    schemas = [word for word in words_of(Grammar(GrammarKind.GRAMMAR, text)) if word.kind is GrammarKind.JSON_SCHEMA]
    assert [json.loads(word.text)["pattern"] for word in schemas] == ["^(?:three)$"]
    [terminal] = [word for word in words_of(Grammar(GrammarKind.GRAMMAR, text)) if word.kind is GrammarKind.GRAMMAR]
    assert terminal.text.splitlines()[-1] == "start: WORD"
    assert terminal.text.startswith("was_start:")


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.CHOICE])
def test_what_begins_with_its_words_has_none_apart(kind: GrammarKind) -> None:
    assert list(words_of(Grammar(kind, '["a"]'))) == []
