"""The fields about tools: `tools`, `tool_choice`, `parallel_tool_calls`; and tool calls in a chat's history.

none       the tools are not shown to the model, and nothing in its answer is a call
auto       they are shown, and what the model writes as a call is one (the default where there are tools)
required   the answer is one or more calls       a named function   it is one call of it
allowed_tools   as auto or required, of some of the tools shown

A grammar enforces what is required, and the arguments' schema: of calls that are required, and of `strict` functions.
"""

import json
import re
from collections.abc import Mapping, Sequence

import orjson

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.core.records import dataclass
from twostroke.router.formats import Placed, check_known, schema_grammar
from twostroke.router.tool_calls import ToolFormat
from twostroke.router.tool_grammar import Callee, forced_grammar, free_grammar, json_or_calls_grammar

MAX_CALLS = 128
"""In one message of the history."""
MAX_ARGUMENT_DEPTH = 64
ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
"""OpenAI's rule, and a dot; as long as Anthropic's."""

Json = Mapping[str, object]

_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_ALLOWED = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED}},
        },
    },
}
TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    },
}
TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}
CALLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": {"type": ["string", "null"]},
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Json
    """JSON schema of its arguments: an object's."""
    strict: bool
    shown: Json
    """As the chat template shows it."""


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """What a request asks about tools."""

    tools: tuple[Tool, ...] = ()
    """Shown to the model; empty: there are none, or none may be called."""
    allowed: tuple[int, ...] = ()
    """Which of them may be called."""
    forced: bool = False
    """The answer must be a call."""
    parallel: bool = True
    named: bool = False
    """One was named: the answer ends as if it were text, as OpenAI has it."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.tools[index].name for index in self.allowed)

    @property
    def max_calls(self) -> int:
        """0: any number."""
        return 0 if self.parallel and not self.named else 1

    @property
    def schemas(self) -> list[Placed]:
        """Those that a grammar enforces, each by itself: so what is wrong with one can be said of it."""
        return [
            Placed(schema_grammar(tool.parameters, field, compact=True), field)
            for index, tool in self._strict()
            for field in [f"tools[{index}].function.parameters"]
        ]

    def grammar(self, format: ToolFormat, answer: Grammar | None) -> Grammar | None:
        """What the answer must follow; `answer` is the JSON schema of what is no call, if one was asked for. None:
        nothing, or `answer` alone.
        """
        strict = dict(self._strict())
        if not strict and (answer is None or not self.allowed):
            return None
        many = self.max_calls == 0
        callees = [
            Callee(self.tools[index].name, strict[index].parameters if index in strict else ANY_OBJECT)
            for index in self.allowed
        ]
        if self.forced:
            text = forced_grammar(format, callees, many=many)
        elif answer is not None:
            text = json_or_calls_grammar(format, callees, json.loads(answer.text), many=many)
        else:
            text = free_grammar(format, callees, many=many)
        return Grammar(GrammarKind.GRAMMAR, text)

    def _strict(self) -> list[tuple[int, Tool]]:
        return [(index, self.tools[index]) for index in self.allowed if self.forced or self.tools[index].strict]


def read_tools(tools: object, tool_choice: object, parallel_tool_calls: object, limits: LimitsSection) -> ToolAsk:
    """Raises InvalidRequest naming the field."""
    if not isinstance(parallel_tool_calls, bool | None):
        raise InvalidRequest("parallel_tool_calls must be true or false", "parallel_tool_calls")
    parallel = parallel_tool_calls is not False
    found = _read_list(tools, limits)
    if not found:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("there are no tools to choose from", "tool_choice")
        return ToolAsk()
    every = tuple(range(len(found)))
    match tool_choice:
        case None | "auto":
            return ToolAsk(found, every, parallel=parallel)
        case "none":
            return ToolAsk()
        case "required":
            return ToolAsk(found, every, forced=True, parallel=parallel)
        case {"type": "function"}:
            named = _named(tool_choice, _indices(found), "tool_choice")
            return ToolAsk(found, (named,), forced=True, named=True)
        case {"type": "allowed_tools"}:
            allowed, forced = _read_allowed(tool_choice, found)
            return ToolAsk(found, allowed, forced=forced, parallel=parallel)
    raise InvalidRequest(
        "tool_choice must be none, auto, required, a function by its name, or allowed_tools", "tool_choice"
    )


def _indices(tools: Sequence[Tool]) -> dict[str, int]:
    return {tool.name: index for index, tool in enumerate(tools)}


def _named(value: object, indices: Mapping[str, int], field: str) -> int:
    """The index of `{"type": "function", "function": {"name": ...}}`."""
    match value:
        case {"type": "function", "function": {"name": str(name), **more}, **others} if name in indices:
            check_known(others, (), field)
            check_known(more, (), f"{field}.function")
            return indices[name]
    raise InvalidRequest("no tool has this name", f"{field}.function.name")


def _read_allowed(value: object, tools: Sequence[Tool]) -> tuple[tuple[int, ...], bool]:
    """(indices, whether one must be called)."""
    field = "tool_choice.allowed_tools"
    match value:
        case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as named}}:
            if len(named) > len(tools):
                raise InvalidRequest(f"there are {len(tools)} tools, not {len(named)}", f"{field}.tools")
            indices = _indices(tools)
            chosen = {_named(item, indices, f"{field}.tools[{number}]") for number, item in enumerate(named)}
            return tuple(sorted(chosen)), mode == "required"
    raise InvalidRequest("allowed_tools has a mode, auto or required, and a list of tools", field)


def _read_list(value: object, limits: LimitsSection) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list", "tools")
    if len(value) > limits.max_tools:
        raise InvalidRequest(f"at most {limits.max_tools} tools, not {len(value)}", "tools")
    tools: dict[str, Tool] = {}
    for index, item in enumerate(value):
        tool = _read_tool(item, f"tools[{index}]", limits)
        if tool.name in tools:
            raise InvalidRequest("two tools have this name", f"tools[{index}].function.name")
        tools[tool.name] = tool
    return tuple(tools.values())


def _read_tool(value: object, field: str, limits: LimitsSection) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidRequest("only tools of type function are supported", f"{field}.type")
    check_known(value, ("type", "function"), field)
    function = value.get("function")
    field = f"{field}.function"
    if not isinstance(function, dict):
        raise InvalidRequest("a function must be an object", field)
    check_known(function, ("name", "description", "parameters", "strict"), field)
    name = _read_name(function.get("name"), f"{field}.name")
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(description, str | None):
        raise InvalidRequest("a description must be a string", f"{field}.description")
    if not isinstance(strict, bool | None):
        raise InvalidRequest("strict must be true or false", f"{field}.strict")
    parameters = _read_parameters(function.get("parameters"), f"{field}.parameters", limits)
    shown = {"name": name, "description": description or "", "parameters": parameters}
    return Tool(name, parameters, strict is True, {"type": "function", "function": shown})


def _read_name(value: object, field: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidRequest("a name has 1 to 128 letters, digits, _, - and .", field)
    return value


def _read_parameters(value: object, field: str, limits: LimitsSection) -> Json:
    if value is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(value, dict):
        raise InvalidRequest("parameters must be a JSON schema", field)
    if value.get("type", "object") != "object":
        raise InvalidRequest("arguments are an object", f"{field}.type")
    size = len(orjson.dumps(value))
    if size > limits.max_tool_schema_bytes:
        raise InvalidRequest(f"a schema has at most {limits.max_tool_schema_bytes} bytes, this one {size}", field)
    return {"type": "object", **value}


def read_tool_calls(value: object, field: str) -> list[Json]:
    """Of an assistant's message in the history, as templates want them: with the arguments as an object; as text where
    they are none, since a model may have written so.
    """
    if not isinstance(value, list):
        raise InvalidRequest("tool_calls must be a list", field)
    check_num_calls(len(value), field)
    return [_read_call(item, f"{field}[{index}]") for index, item in enumerate(value)]


def check_num_calls(count: int, field: str) -> None:
    if count > MAX_CALLS:
        raise InvalidRequest(f"at most {MAX_CALLS} tool calls in a message, not {count}", field)


def _read_call(value: object, field: str) -> Json:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise InvalidRequest("only calls of type function are supported", f"{field}.type")
    check_known(value, ("id", "type", "function", "index"), field)
    call_id, function = value.get("id"), value.get("function")
    if not isinstance(call_id, str | None):
        raise InvalidRequest("an id must be a string", f"{field}.id")
    if not isinstance(function, dict):
        raise InvalidRequest("a function must be an object", f"{field}.function")
    # The last is what OpenAI's own package made of the arguments.
    check_known(function, ("name", "arguments", "parsed_arguments"), f"{field}.function")
    name = _read_name(function.get("name"), f"{field}.function.name")
    arguments = _read_arguments(function.get("arguments"), f"{field}.function.arguments")
    return {"id": call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(value: object, field: str) -> Json | str:
    if not isinstance(value, str):
        raise InvalidRequest("arguments must be a string", field)
    try:
        # As strict as for the body: no NaN, no lone surrogates. But large integers stay what they are.
        orjson.loads(value or "{}")
        arguments = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    if not isinstance(arguments, dict):
        return value
    check_depth(arguments, MAX_ARGUMENT_DEPTH, "arguments", field)
    return arguments


def check_depth(value: object, most: int, name: str, field: str) -> None:
    """Level by level. Raises InvalidRequest naming `field` when JSON is nested over `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [part for item in level for part in _parts(item)]
        if not level:
            return
    raise InvalidRequest(f"{name} are nested over {most} levels deep", field)


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
