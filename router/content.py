"""The fields that take several shapes: `prompt`, `messages`, `chat_template_kwargs`, `stop`, `stop_token_ids`.

Written by hand, since a schema's union reports one mistake once per alternative, and a list of a million wrong items
a million times.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.ask import Prompt
from twostroke.router.chat_template import RESERVED, ChatOptions, Message
from twostroke.router.renaming import rewritten
from twostroke.router.tools import CALLS_SCHEMA, ToolAsk, read_tool_calls

ROLES = ("system", "developer", "user", "assistant")
"""`developer` is what newer clients call `system`; templates know only the older word."""
MAX_NAME = 64
_NAME = re.compile(r"[^\s<|\\/>]{1,64}\Z")
"""OpenAI's rule for names. It also keeps a name from being a piece of a control token."""
MAX_VARIABLES = 64
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\Z")
_EMPTY_IN_MESSAGES = frozenset(
    {"annotations", "audio", "function_call", "reasoning_content", "refusal", "tool_call_id", "tool_calls"}
)
"""An answer's message that the client sends back has these; they may hold nothing (null, [] or "")."""
_FROM_A_PACKAGE = "parsed"
"""What OpenAI's own package made of an answer's content: it comes back with the message, and means nothing."""
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_KINDS: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": _PART}]
_OR_NULL = {"anyOf": [*_KINDS, {"type": "null"}]}
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": [*ROLES, "tool"]},
        "content": _OR_NULL,
        "name": {"type": "string"},
        "reasoning_content": _OR_NULL,
        "tool_calls": {"anyOf": [CALLS_SCHEMA, {"type": "null"}]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    # Only calls need no text.
    "anyOf": [{"required": ["content"], "properties": {"content": {"anyOf": _KINDS}}}, {"required": ["tool_calls"]}],
}


def read_prompts(value: object, max_prompts: int) -> list[tuple[str, Prompt]]:
    """(field, prompt) of each: a string, a list of token ids, or a list of either kind."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return [("prompt", _prompt(value, "prompt"))]
    if len(value) > max_prompts:
        raise InvalidRequest(f"at most {max_prompts} prompts a request, not {len(value)}", "prompt")
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequest("prompts must be all strings, or all lists of token ids", f"prompt[{index}]")
    return [(f"prompt[{index}]", _prompt(item, f"prompt[{index}]")) for index, item in enumerate(value)]


def _prompt(value: object, field: str) -> Prompt:
    if not isinstance(value, str | list):
        raise InvalidRequest("prompt must be a string or a list of token ids, or a list of these", field)
    if not value:
        raise InvalidRequest("the prompt is empty", field)
    return value if isinstance(value, str) else read_ids(value, field)


def read_variables(value: object) -> dict[str, object]:
    """`chat_template_kwargs`: names that a template may ask for, to any JSON."""
    field = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field} must be an object", field)
    if len(value) > MAX_VARIABLES:
        raise InvalidRequest(f"at most {MAX_VARIABLES} {field}, not {len(value)}", field)
    for name in value:
        if name in RESERVED or not _VARIABLE.match(name):
            raise InvalidRequest("a template cannot be given a variable of this name", f"{field}.{name[:128]}")
    return dict(value)


def read_chat_options(
    add_generation_prompt: bool | None, continue_final_message: bool, variables: object, tools: ToolAsk | None = None
) -> ChatOptions:
    """`add_generation_prompt` not sent: unless the final message is continued. Raises InvalidRequest."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest("continue_final_message excludes add_generation_prompt", "continue_final_message")
    generation = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    given = read_variables(variables)
    if tools is not None and tools.tools:
        given["tools"] = [tool.shown for tool in tools.tools]
    return ChatOptions(generation, continue_final_message, given)


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
    return tuple(read_ids(value, "stop_token_ids"))


def read_messages(
    value: object, max_messages: int, field: str = "messages", *, with_tools: bool = False
) -> list[Message]:
    """Messages with a role, text and maybe a name; `with_tools` also an assistant's reasoning and tool calls, and what
    tools answered. Text parts are joined by newlines, as vLLM joins them.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list of at least one message", field)
    if len(value) > max_messages:
        raise InvalidRequest(f"at most {max_messages} messages, not {len(value)}", field)
    return [_message(message, f"{field}[{index}]", with_tools) for index, message in enumerate(value)]


def read_message(value: object, path: str, *names: tuple[str, str]) -> dict[str, object]:
    """One, as a chat with tools may have it, made of what another API calls otherwise: see `rewritten` for `names`."""
    with rewritten(names):
        return _message(value, path, with_tools=True)


def _message(value: object, path: str, with_tools: bool) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest("a message must be an object", path)
    role = value.get("role")
    roles = (*ROLES, "tool") if with_tools else ROLES
    if not isinstance(role, str) or role not in roles:
        raise InvalidRequest(f"role must be one of {', '.join(roles)}", f"{path}.role")
    if role == "developer":
        role = "system"
    said = _said(value, role, path) if with_tools else {"content": _text(value.get("content"), f"{path}.content")}
    message: dict[str, object] = {"role": role, **said}
    for name, item in value.items():
        if name in message or (name in _EMPTY_IN_MESSAGES and item in (None, [], "")):
            continue
        if name == _FROM_A_PACKAGE and role == "assistant":
            continue
        shown = f"{path}.{name[:128]}"
        if name != "name":
            raise InvalidRequest("this field of a message is not supported here", shown)
        if not isinstance(item, str | None):
            raise InvalidRequest("a name must be a string", shown)
        if item is not None:
            if not _NAME.match(item):
                raise InvalidRequest(
                    f"a name has 1 to {MAX_NAME} characters, without white space and none of < | \\ / >", shown
                )
            message["name"] = item
    return message


def _said(value: Mapping[str, object], role: str, path: str) -> dict[str, object]:
    """Text, and what goes with it in messages of assistants and tools."""
    said: dict[str, object] = {}
    if role == "assistant" and value.get("tool_calls"):
        said["tool_calls"] = read_tool_calls(value["tool_calls"], f"{path}.tool_calls")
    if role == "assistant" and value.get("reasoning_content"):
        said["reasoning_content"] = _text(value["reasoning_content"], f"{path}.reasoning_content")
    if role == "tool" and value.get("tool_call_id") is not None:
        call_id = said["tool_call_id"] = value["tool_call_id"]
        if not isinstance(call_id, str):
            raise InvalidRequest("a tool_call_id must be a string", f"{path}.tool_call_id")
    content = value.get("content")
    only_calls = content in (None, []) and "tool_calls" in said
    return {"content": "" if only_calls else _text(content, f"{path}.content"), **said}


def _text(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest("content must be a string or a list of text parts", path)
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f", not {kind[:64]!r}" if isinstance(kind, str) else ""
            raise InvalidRequest(f"only parts of type 'text' are supported{shown}", f"{path}[{index}].type")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest("text must be a string", f"{path}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def read_ids(values: Sequence[object], field: str) -> list[int]:
    """Integers; whether they are tokens is for the tokenizer to say."""
    found = [value for value in values if type(value) is int]  # `type`: true is no 1
    if len(found) < len(values):
        index = next(index for index, value in enumerate(values) if type(value) is not int)
        raise InvalidRequest("token ids must be integers", f"{field}[{index}]")
    return found
