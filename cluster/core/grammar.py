"""What an answer's text must look like, as plain data. Compiled by `engine.grammar`, on routers and on workers."""

from enum import Enum

from twostroke.cluster.core.records import dataclass


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    """`text` is a JSON schema."""
    REGEX = "regex"
    """`text` is a regular expression without look-around and back-references; the whole answer matches it."""
    CHOICE = "choice"
    """`text` is a JSON list of strings, of which the answer is one."""
    GRAMMAR = "grammar"
    """`text` is a context-free grammar, in Lark's or GBNF's notation."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Equal grammars are compiled once."""

    kind: GrammarKind
    text: str
    compact: bool = False
    """JSON_SCHEMA: no white space between the parts of a value. Else a little of it."""


ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
"""Any JSON object."""
