"""The items of `input` as the messages of a chat, in the order in which they came.

message                  a message; of its parts, the text
reasoning                what the assistant's next message, or its calls, had before it
function_call            a call of the assistant's message before it, else of one without text
function_call_output     a message of the tool's
"""

from collections.abc import Mapping
from typing import Any

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.chat_template import Message
from twostroke.router.content import read_message

_TEXT_PARTS = {
    "input_text": {"type", "text", "prompt_cache_breakpoint"},
    "output_text": {"type", "text", "annotations", "logprobs", "parsed"},
}
"""Kind of a part to the fields it may have; all but the text mean nothing here. `parsed` is what OpenAI's own package
made of it, as `parsed_arguments` are of a call's.
"""
_FROM_AN_OUTPUT = frozenset({"id", "phase", "status", "type"})
"""What an output item that is sent back has besides."""
_FIELDS = {
    "function_call": {"call_id", "name", "arguments", "parsed_arguments", "id", "status", "type"},
    "function_call_output": {"call_id", "output", "id", "status", "type"},
    "reasoning": {"content", "summary", "encrypted_content", "id", "status", "type"},
}

_TEXT: dict[str, Any] = {"type": "string"}
_PART = {"type": "object", "properties": {"type": {"enum": list(_TEXT_PARTS)}, "text": _TEXT}}
_PARTS = {"type": "array", "items": _PART}
_CONTENT = {"anyOf": [_TEXT, _PARTS]}


def _item_schema(kind: str, **required: dict[str, Any]) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required}
    return {"type": "object", "required": list(properties), "properties": properties}


_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": _CONTENT,
    },
}
_ITEM = {
    "anyOf": [
        _MESSAGE,
        _item_schema("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
        _item_schema("function_call_output", call_id=_TEXT, output=_CONTENT),
        _item_schema("reasoning"),
    ]
}
INPUT_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _ITEM}]}


def read_items(value: object, limits: LimitsSection) -> list[Message]:
    """Raises InvalidRequest naming the field."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input must be a string or a list of at least one item", "input")
    if len(value) > limits.max_messages:
        raise InvalidRequest(f"at most {limits.max_messages} items, not {len(value)}", "input")
    messages: list[dict[str, object]] = []
    for index, item in enumerate(value):
        message = _read(item, f"input[{index}]")
        if message is not None and not (messages and _join(messages[-1], message)):
            messages.append(message)
    if not messages:
        raise InvalidRequest("input must hold a message", "input")
    return list(messages)


def _join(last: dict[str, object], message: Mapping[str, object]) -> bool:
    """Make one message of an assistant's reasoning, text and calls; False when they are two."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    calls, more = last.get("tool_calls"), message.get("tool_calls")
    if isinstance(more, list):
        if isinstance(calls, list):
            calls.extend(more)
        else:
            last["tool_calls"] = more
        return True
    if calls is None and not last["content"] and "reasoning_content" not in message:
        last["content"] = message["content"]
        return True
    return False


def _read(item: object, path: str) -> dict[str, object] | None:
    """None for what says nothing."""
    if not isinstance(item, dict):
        raise InvalidRequest("an item must be an object", path)
    kind = item.get("type", "message")
    if kind == "message":
        plain = {name: value for name, value in item.items() if name not in _FROM_AN_OUTPUT}
        plain["content"] = _content(item.get("content"), f"{path}.content")
        if plain.get("role") == "tool":  # a chat's, not an item's
            raise InvalidRequest("role must be one of system, developer, user, assistant", f"{path}.role")
        return read_message(plain, path)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise InvalidRequest(f"items of type {str(kind)[:64]!r} are not supported here", f"{path}.type")
    for name, value in item.items():
        if name not in _FIELDS[kind] and value is not None:
            raise InvalidRequest("this field of an item is not supported here", f"{path}.{name[:128]}")
    match kind:
        case "function_call":
            return _call(item, path)
        case "function_call_output":
            return _output(item, path)
        case _:
            return _reasoning(item, path)


def _call(item: Mapping[str, object], path: str) -> dict[str, object]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise InvalidRequest("a call_id must be a string", f"{path}.call_id")
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    plain = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}
    return read_message(plain, path, (f"{path}.tool_calls[0].function", path))


def _output(item: Mapping[str, object], path: str) -> dict[str, object]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise InvalidRequest("a call_id must be a string", f"{path}.call_id")
    output = _content(item.get("output"), f"{path}.output")
    plain = {"role": "tool", "content": output, "tool_call_id": call_id}
    return read_message(plain, path, (f"{path}.content", f"{path}.output"))


def _reasoning(item: Mapping[str, object], path: str) -> dict[str, object] | None:
    content = item.get("content")
    if content in (None, []):
        return None
    if not isinstance(content, list):
        raise InvalidRequest("content must be a list", f"{path}.content")
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "reasoning_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InvalidRequest("a part of reasoning_text and its text is wanted", f"{path}.content[{index}]")
    return {"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)}


def _content(value: object, path: str) -> object:
    if not isinstance(value, list):
        return value
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(value)]


def _part(part: object, path: str) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        wanted = " and ".join(_TEXT_PARTS)
        raise InvalidRequest(f"only parts of type {wanted} are supported, not {str(kind)[:64]!r}", f"{path}.type")
    unknown = next((name for name, value in part.items() if name not in _TEXT_PARTS[kind] and value is not None), None)
    if unknown is not None:
        raise InvalidRequest("this field of a part is not supported here", f"{path}.{unknown[:128]}")
    return {"type": "text", "text": part.get("text")}
