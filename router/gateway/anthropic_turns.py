"""The turns of `messages` as the messages of a chat.

text                           joined, as a chat's parts are
user: tool_result              a message of the tool's, before what else the user says in this turn
assistant: thinking, tool_use  what its message had before the text, and its calls
"""

from collections.abc import Mapping
from typing import Any

import orjson

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.chat_template import Message
from twostroke.router.content import read_message
from twostroke.router.tools import check_num_calls

ROLES = ("user", "assistant")
_FIELDS = {
    "text": {"text", "citations", "parsed_output"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "tool_use": {"id", "name", "input", "caller"},
    "thinking": {"thinking", "signature"},
}
"""Kind of a block to the fields it may have, `type` and `cache_control` aside. `parsed_output` is what Anthropic's own
package made of the text.
"""
_BLOCKS_OF = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}

_STRING: dict[str, Any] = {"type": "string"}


def _block_schema(kind: str, **required: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required}
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT_BLOCK = _block_schema("text", text=_STRING)
TEXT_SCHEMA = {"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK}]}
"""Of `system`, and of what a tool answered."""


def _turn_schema(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, *blocks]}}]}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


TURNS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _turn_schema("user", _block_schema("tool_result", tool_use_id=_STRING)),
            _turn_schema(
                "assistant",
                _block_schema("thinking", thinking=_STRING),
                _block_schema("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
            ),
        ]
    },
}


def read_turns(value: object, limits: LimitsSection) -> list[Message]:
    """Raises InvalidRequest naming the field."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    if len(value) > limits.max_messages:
        raise InvalidRequest(f"at most {limits.max_messages} messages, not {len(value)}", "messages")
    messages: list[Message] = []
    for index, turn in enumerate(value):
        messages += _turn(turn, f"messages[{index}]", limits)
        if len(messages) > limits.max_messages:  # each result of a tool is one
            raise InvalidRequest(f"at most {limits.max_messages} messages and results of tools", "messages")
    return messages


def read_system(value: object) -> list[Message]:
    """None or one message. Raises InvalidRequest naming the field."""
    if value is None:
        return []
    if not isinstance(value, str | list) or value == []:
        raise InvalidRequest("system must be a string or a list of text blocks", "system")
    return [
        read_message({"role": "system", "content": _texts(value, "system")}, "system", ("system.content", "system"))
    ]


def _turn(turn: object, path: str, limits: LimitsSection) -> list[Message]:
    if not isinstance(turn, dict):
        raise InvalidRequest("a message must be an object", path)
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(ROLES)}", f"{path}.role")
    for name in turn:
        if name not in ("role", "content"):
            raise InvalidRequest("this field of a message is not supported here", f"{path}.{name[:128]}")
    if not isinstance(content, list) or not content:
        return [read_message({"role": role, "content": content}, path)]
    if len(content) > limits.max_messages:
        raise InvalidRequest(f"at most {limits.max_messages} blocks, not {len(content)}", f"{path}.content")
    blocks = [(_kind(block, role, f"{path}.content[{index}]"), block) for index, block in enumerate(content)]
    places = [(kind, block, f"{path}.content[{index}]") for index, (kind, block) in enumerate(blocks)]
    texts = [_text(block, place) for kind, block, place in places if kind == "text"]
    if role == "user":
        results = [_result(block, place) for kind, block, place in places if kind == "tool_result"]
        return [*results, *([read_message({"role": role, "content": texts}, path)] if texts else [])]
    message: dict[str, object] = {"role": role, "content": ""}
    if texts:
        message = read_message({"role": role, "content": texts}, path)
    thoughts = [_thought(block, place) for kind, block, place in places if kind == "thinking"]
    used = [(block, place) for kind, block, place in places if kind == "tool_use"]
    check_num_calls(len(used), f"{path}.content")
    calls = [_call(block, place) for block, place in used]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _kind(block: object, role: str, path: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    known = _BLOCKS_OF[role]
    if not isinstance(block, dict) or kind not in known:
        shown = f", not {kind[:64]!r}" if isinstance(kind, str) else ""
        raise InvalidRequest(f"blocks of the {role}'s can be of type {', '.join(known)} here{shown}", f"{path}.type")
    known = ("type", "cache_control", *_FIELDS[kind])
    unknown = next((name for name, value in block.items() if name not in known and value is not None), None)
    if unknown is not None:
        raise InvalidRequest("this field of a block is not supported here", f"{path}.{unknown[:128]}")
    return str(kind)


def _text(block: Mapping[str, object], path: str) -> dict[str, object]:
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("text must be a string", f"{path}.text")
    return {"type": "text", "text": text}


def _texts(value: object, path: str) -> object:
    """A string, or blocks of text, as a chat's content."""
    if not isinstance(value, list):
        return value
    found: list[object] = []
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise InvalidRequest("only blocks of type text are supported here", f"{path}[{index}].type")
        _kind(block, "user", f"{path}[{index}]")
        found.append(_text(block, f"{path}[{index}]"))
    return found


def _thought(block: Mapping[str, object], path: str) -> str:
    thinking = block.get("thinking")
    if not isinstance(thinking, str):
        raise InvalidRequest("thinking must be a string", f"{path}.thinking")
    return thinking


def _result(block: Mapping[str, object], path: str) -> dict[str, object]:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise InvalidRequest("a tool_use_id must be a string", f"{path}.tool_use_id")
    said = _texts("" if content in (None, []) else content, f"{path}.content")
    return read_message({"role": "tool", "tool_call_id": call_id, "content": said}, path)


def _call(block: Mapping[str, object], path: str) -> object:
    """As a message's `tool_calls` have it."""
    call_id, arguments = block.get("id"), block.get("input")
    if not isinstance(call_id, str):
        raise InvalidRequest("an id must be a string", f"{path}.id")
    if not isinstance(arguments, dict):
        raise InvalidRequest("input must be an object", f"{path}.input")
    function = {"name": block.get("name"), "arguments": orjson.dumps(arguments).decode()}
    plain = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}
    function_path = f"{path}.tool_calls[0].function"
    names = ((f"{function_path}.arguments", f"{path}.input"), (function_path, path))
    calls = read_message(plain, path, *names)["tool_calls"]
    assert isinstance(calls, list)
    return calls[0]
