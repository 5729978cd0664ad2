"""Tools as `/v1/responses` and `/v1/messages` write them, turned into those of chats, which `router.tools` reads.

What that finds wrong is said of the client's own fields: see `RESPONSES_NAMES` and `MESSAGES_NAMES`, for `rewritten`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.cluster.core.errors import InvalidRequest

RESPONSES_NAMES = (("tool_choice.allowed_tools", "tool_choice"), (".function.", "."), (".function", ""))
MESSAGES_NAMES = ((".function.parameters", ".input_schema"), (".function.", "."), (".function", ""))

_WITHOUT_EFFECT = frozenset({"allowed_callers", "async", "defer_loading", "input_examples", "output_schema"})
"""Fields of a tool that may ask for nothing."""
_IGNORED = frozenset({"cache_control", "eager_input_streaming"})

_NAMED = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}
_ALLOWED = {
    "type": "object",
    "required": ["type", "mode", "tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED},
    },
}
RESPONSES_TOOLS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "name"],
        "properties": {
            "type": {"const": "function"},
            "name": {"type": "string"},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
        },
    },
}
RESPONSES_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}
MESSAGES_TOOLS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "type": {"enum": ["custom", None]},
            "name": {"type": "string"},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": "object"},
            "strict": {"type": ["boolean", "null"]},
        },
    },
}
MESSAGES_CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": "string"},
        "disable_parallel_tool_use": {"type": "boolean"},
    },
}


class ChatTools(NamedTuple):
    """Fields of a chat, as a client might have sent them."""

    tools: object
    tool_choice: object
    parallel_tool_calls: object


def from_responses(tools: object, tool_choice: object, parallel_tool_calls: object) -> ChatTools:
    """Raises nothing: what has another shape is left as it is, for `read_tools` to refuse."""
    if isinstance(tool_choice, dict):
        tool_choice = _choice(tool_choice)
    return ChatTools(_functions(tools), tool_choice, parallel_tool_calls)


def from_messages(tools: object, tool_choice: object) -> ChatTools:
    """Raises InvalidRequest naming the field, where `read_tools` would not know what is wrong."""
    if isinstance(tools, list):
        tools = [_custom(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if tool_choice is None:
        return ChatTools(tools, None, None)
    if not isinstance(tool_choice, dict):
        raise InvalidRequest("tool_choice must be an object", "tool_choice")
    unknown = next((name for name in tool_choice if name not in ("type", "name", "disable_parallel_tool_use")), None)
    if unknown is not None:
        raise InvalidRequest("this field is not supported here", f"tool_choice.{unknown[:128]}")
    alone = tool_choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise InvalidRequest("disable_parallel_tool_use must be true or false", "tool_choice.disable_parallel_tool_use")
    match tool_choice.get("type"):
        case "auto" | "none" as choice:
            return ChatTools(tools, choice, not alone)
        case "any":
            return ChatTools(tools, "required", not alone)
        case "tool":
            named = {"type": "function", "function": {"name": tool_choice.get("name")}}
            return ChatTools(tools, named, not alone)
    raise InvalidRequest("type must be one of auto, any, tool, none", "tool_choice.type")


def _choice(choice: Mapping[str, object]) -> object:
    match choice.get("type"):
        case "function":
            return _function(choice)
        case "allowed_tools":
            allowed = {name: choice[name] for name in choice if name != "type"}
            if "tools" in allowed:
                allowed["tools"] = _functions(allowed["tools"])
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _functions(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    return [_function(tool) if isinstance(tool, dict) and tool.get("type") == "function" else tool for tool in tools]


def _function(tool: Mapping[str, object]) -> dict[str, object]:
    """With what is beside the type in an object of its own."""
    parts = {name: tool[name] for name in tool if name != "type" and not _is_idle(name, tool[name])}
    return {"type": "function", "function": parts}


def _custom(tool: object, path: str) -> object:
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest("only tools of the client's own are supported, of type custom", f"{path}.type")
    if tool.get("input_schema") is None:
        raise InvalidRequest("a tool has an input_schema", f"{path}.input_schema")
    parts = {name: tool[name] for name in tool if name not in ("type", "input_schema", *_IGNORED)}
    kept = {name: value for name, value in parts.items() if not _is_idle(name, value)}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def _is_idle(name: str, value: object) -> bool:
    return name in _WITHOUT_EFFECT and value in (None, False, [], ["direct"])
