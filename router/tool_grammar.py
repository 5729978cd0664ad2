"""Grammars of answers that are, or may hold, tool calls; in Lark's notation. Pure.

    forced   one call, or several where they are wanted and the format has a way to write them
    or JSON  calls as in forced, or JSON of a schema
    free     text in which calls may come: what begins as a call is held to be one

Calls and JSON are written the way templates show them to models (as `json.dumps` does), so no white space runs on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from twostroke.router.tool_calls import HermesParser, MistralParser, ToolFormat


class Callee(NamedTuple):
    name: str
    parameters: Mapping[str, object]
    """JSON schema of the arguments: an object's."""


_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_MARKS = {ToolFormat.HERMES: HermesParser.OPEN, ToolFormat.LLAMA: "", ToolFormat.MISTRAL: MistralParser.OPEN}


def forced_grammar(format: ToolFormat, callees: Sequence[Callee], *, many: bool) -> str:
    return "\n".join([f"start: {_calls(format, many)}", *_call(format, callees, many)])


def json_or_calls_grammar(
    format: ToolFormat, callees: Sequence[Callee], schema: Mapping[str, object], *, many: bool
) -> str:
    start = f"start: {_calls(format, many)} | answer"
    return "\n".join([start, f"answer: {_json(schema)}", *_call(format, callees, many)])


def free_grammar(format: ToolFormat, callees: Sequence[Callee], *, many: bool) -> str:
    if format is ToolFormat.LLAMA:
        # Its calls have no mark, so an answer that begins with a brace is one.
        text = r"TEXT: /([ \n\r\t]*[^ \n\r\t{](.|\n)*)?/"
        return "\n".join(["start: call | TEXT", text, *_call(format, callees, many)])
    return "\n".join(
        [
            "start: said* TEXT" if many else "start: said | TEXT",
            r"TEXT: /(.|\n)*/",
            # Lazy: it ends with the first mark, from where on there is no other way but a call.
            f"begun[lazy]: TEXT {json.dumps(_MARKS[format])}",
            f"said: begun {_after_mark(format, many)}",
            *_bodies(format, callees),
        ]
    )


def _calls(format: ToolFormat, many: bool) -> str:
    return r'call ("\n" call)*' if many and format is ToolFormat.HERMES else "call"


def _call(format: ToolFormat, callees: Sequence[Callee], many: bool) -> list[str]:
    mark = json.dumps(_MARKS[format]) if _MARKS[format] else ""
    return [f"call: {mark} {_after_mark(format, many)}", *_bodies(format, callees)]


def _after_mark(format: ToolFormat, many: bool) -> str:
    match format:
        case ToolFormat.HERMES:
            return r'"\n" body "\n</tool_call>"'
        case ToolFormat.LLAMA:
            return "body"
        case ToolFormat.MISTRAL:
            return '"[" body (", " body)* "]"' if many else '"[" body "]"'


def _bodies(format: ToolFormat, callees: Sequence[Callee]) -> list[str]:
    field = "parameters" if format is ToolFormat.LLAMA else "arguments"
    # In pieces, as JSON is lexed: else a brace could begin no other object.
    heads = [("{", '"name"', ": ", f'"{callee.name}"', ", ", f'"{field}"', ": ") for callee in callees]
    bodies = [f'{" ".join(map(json.dumps, head))} arguments_{number} "}}"' for number, head in enumerate(heads)]
    arguments = [f"arguments_{number}: {_json(callee.parameters)}" for number, callee in enumerate(callees)]
    return [f"body: {' | '.join(bodies)}", *arguments]


def _json(schema: Mapping[str, object]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)
