"""The fields of `/v1/messages` and `/v1/messages/count_tokens`, by the rules of `router.gateway.schema`.

`system` becomes the first message; text blocks are joined as `/v1/chat/completions` joins text parts, so that the
same conversation gives the same prompt over both. `cache_control` is ignored: every prefix is cached anyway.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.chat_template import ChatOptions, Message
from twostroke.router.gateway.content import read_messages, read_stop
from twostroke.router.gateway.formats import read_output_config
from twostroke.router.gateway.renaming import renamed
from twostroke.router.gateway.schema import Ask, Chat, validate
from twostroke.router.prepare import GenerateParams, check_params

IGNORED: Mapping[str, type] = {"cache_control": dict, "diagnostics": dict, "inference_geo": str, "metadata": dict}
IGNORED_IN_COUNTS: Mapping[str, type] = {**IGNORED, "output_config": dict}
"""A form of the answer changes no prompt."""

UNSERVED: Mapping[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Field to the values that ask for nothing, null aside."""

ROLES = ("user", "assistant")
_IN_A_BLOCK = frozenset({"type", "text", "cache_control", "citations"})
_BLOCK = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT},
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_TEXTS = {"type": "array", "items": {"type": "string"}}


class CountBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    messages: Annotated[object, WithJsonSchema(_MESSAGES)]
    system: Annotated[object, WithJsonSchema(_CONTENT)] = None


_OUTPUT_CONFIG = {
    "type": "object",
    "properties": {
        "format": {
            "type": "object",
            "required": ["type", "schema"],
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
        }
    },
}


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[object, WithJsonSchema(_TEXTS)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Up to 2, as elsewhere here; Anthropic's own API stops at 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    stream: bool = False
    output_config: Annotated[object, WithJsonSchema(_OUTPUT_CONFIG)] = None
    seed: int | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: str = ""


def parse_messages(body: dict[str, object], limits: LimitsSection) -> Ask:
    """Raises InvalidRequest naming the field."""
    parsed = validate(MessagesBody, body, UNSERVED, IGNORED)
    if parsed.stop_sequences is not None and not isinstance(parsed.stop_sequences, list):
        raise InvalidRequest("stop_sequences must be a list of strings", "stop_sequences")
    form = read_output_config(parsed.output_config)
    with renamed({"stop": "stop_sequences"}):
        params = GenerateParams(
            max_tokens=parsed.max_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            seed=parsed.seed,
            stop=read_stop(parsed.stop_sequences),
            timeout_s=parsed.timeout,
            grammar=form.grammar if form is not None else None,
            grammar_field=form.field if form is not None else "output_config",
        )
        check_params(params, limits)
    return Ask(
        model=parsed.model,
        prompt=_conversation(parsed, limits),
        params=params,
        streamed=parsed.stream,
        include_usage=True,
        salt=parsed.cache_salt,
    )


def parse_count(body: dict[str, object], limits: LimitsSection) -> Ask:
    """As much of a request as decides how many tokens its prompt has. Raises InvalidRequest naming the field."""
    parsed = validate(CountBody, body, UNSERVED, IGNORED_IN_COUNTS)
    return Ask(
        model=parsed.model,
        prompt=_conversation(parsed, limits),
        params=GenerateParams(),
        streamed=False,
        include_usage=False,
        salt="",
    )


def _conversation(body: CountBody, limits: LimitsSection) -> Chat:
    """An answer that the client has begun (a last message of the assistant's) is gone on with."""
    if not isinstance(body.messages, list):
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    messages = read_messages(plain, limits.max_messages)
    is_begun = messages[-1]["role"] == "assistant"
    options = ChatOptions(add_generation_prompt=not is_begun, continue_final_message=is_begun)
    return Chat([*_system(body.system, limits), *messages], options)


def _system(value: object, limits: LimitsSection) -> list[Message]:
    if value is None:
        return []
    if not isinstance(value, str | list) or value == []:
        raise InvalidRequest("system must be a string or a list of text blocks", "system")
    return read_messages([{"role": "system", "content": _content(value, "system")}], limits.max_messages, "system")


def _plain(message: object, path: str) -> object:
    """A message as `/v1/chat/completions` would have it; what is no object is left to `read_messages`."""
    if not isinstance(message, dict):
        return message
    if message.get("role") not in ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(ROLES)}", f"{path}.role")
    return {**message, "content": _content(message.get("content"), f"{path}.content")}


def _content(value: object, path: str) -> object:
    if not isinstance(value, list):
        return value
    return [_block(block, f"{path}[{index}]") for index, block in enumerate(value)]


def _block(block: object, path: str) -> object:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind != "text":
        raise InvalidRequest(f"only blocks of type text are supported, not {str(kind)[:64]!r}", f"{path}.type")
    unknown = next((name for name in block if name not in _IN_A_BLOCK), None)
    if unknown is not None:
        raise InvalidRequest("this field of a text block is not supported here", f"{path}.{unknown[:128]}")
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("text must be a string", f"{path}.text")
    return {"type": "text", "text": text}
