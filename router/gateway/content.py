"""The fields that take several shapes: `prompt`, `messages`, `stop`, `stop_token_ids`.

Written by hand, since a schema's union reports one mistake once per alternative, and a list of a million wrong items
a million times.
"""

from collections.abc import Sequence

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.chat_template import Message

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 8192
_EMPTY_IN_MESSAGES = frozenset({"annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_calls"})
"""An answer's message that the client sends back has these; they may hold nothing (null or [])."""


def read_prompt(value: object) -> str | list[int]:
    """A string, a list of token ids, or a list that holds one of either."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise InvalidRequest("the prompt is empty", "prompt")
        return value
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
    if not value:
        raise InvalidRequest("the prompt is empty", "prompt")
    if len(value) > 1 and isinstance(value[0], str | list):
        raise InvalidRequest(f"one prompt a request, not {len(value)}", "prompt")
    return _integers(value, "prompt")


def read_stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest("stop must be a string or a list of strings", "stop")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidRequest("a stop string must be a string", f"stop[{index}]")
    return tuple(value)


def read_stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("stop_token_ids must be a list of integers", "stop_token_ids")
    return tuple(_integers(value, "stop_token_ids"))


def read_messages(value: object, field: str = "messages") -> list[Message]:
    """Messages with a role, text and maybe a name. Text parts are joined by newlines, as vLLM joins them."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", field)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages, not {len(value)}", field)
    return [_message(message, f"{field}[{index}]") for index, message in enumerate(value)]


def _message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest("a message must be an object", path)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(ROLES)}", f"{path}.role")
    message: dict[str, object] = {"role": role, "content": _text(value.get("content"), f"{path}.content")}
    for name, item in value.items():
        if name in message or (name in _EMPTY_IN_MESSAGES and item in (None, [])):
            continue
        shown = f"{path}.{name[:128]}"
        if name != "name":
            raise InvalidRequest("this field of a message is not supported here", shown)
        if not isinstance(item, str | None):
            raise InvalidRequest("a name must be a string", shown)
        if item is not None:
            message["name"] = item
    return message


def _text(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest("content must be a string or a list of text parts", path)
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRequest("only parts of type text are supported", f"{path}[{index}].type")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest("text must be a string", f"{path}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _integers(values: Sequence[object], field: str) -> list[int]:
    found = [value for value in values if type(value) is int]  # `type`: true is no 1
    if len(found) < len(values):
        index = next(index for index, value in enumerate(values) if type(value) is not int)
        raise InvalidRequest("token ids must be integers", f"{field}[{index}]")
    return found
