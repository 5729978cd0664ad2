"""The words of a grammar, each as a grammar of its own: what costs most once an answer gets there, and not before.

JSON_SCHEMA   each `pattern`, and each name of `patternProperties`
GRAMMAR       each regular expression, each terminal, and the words of each `%json` schema
REGEX, CHOICE none: an answer begins with them
"""

import json
import re
from collections.abc import Iterator

from twostroke.cluster.core.grammar import Grammar, GrammarKind

_DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are no schemas."""
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/|//.*|%json\s*(?=\{)')
_TERMINAL = re.compile(r"^([A-Z_][A-Z0-9_]*)\s*[:\[]", re.MULTILINE)
_START = re.compile(r"^start(?=\s*:)", re.MULTILINE)


def words_of(grammar: Grammar) -> Iterator[Grammar]:
    """Without repeats. Some may be wrong by themselves in a grammar that is right. Raises ValueError for what is no
    JSON, RecursionError for what is nested too deep.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            yield from dict.fromkeys(map(_of_pattern, _patterns(json.loads(grammar.text))))
        case GrammarKind.GRAMMAR:
            yield from dict.fromkeys(_of_lark(grammar.text))


def _of_pattern(pattern: str) -> Grammar:
    """A text of which `pattern` is the whole: a search for it would cost nothing before its first characters came."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"}))


def _patterns(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
        for keyword, part in schema.items():
            if keyword not in _DATA:
                yield from _patterns(part)


def _of_lark(text: str) -> Iterator[Grammar]:
    decoder = json.JSONDecoder()
    at = 0
    while (found := _LARK.search(text, at)) is not None:
        at = found.end()
        if found[0].startswith("%json"):
            schema, at = decoder.raw_decode(text, at)
            yield from map(_of_pattern, _patterns(schema))
        elif found[1]:
            yield Grammar(GrammarKind.REGEX, found[1])
    for terminal in _TERMINAL.findall(text):
        yield Grammar(GrammarKind.GRAMMAR, _START.sub("was_start", text) + f"\nstart: {terminal}\n")
