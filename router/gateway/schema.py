"""The fields of `/v1/chat/completions` and `/v1/completions`, and what a body turns into.

Rules for fields, in this order:

    null                         the same as not sent, for every field that is known
    harmless and not used here   ignored (`IGNORED`)
    known to OpenAI, not served  refused, unless the value asks for nothing (`UNSERVED`)
    unknown                      refused: a misspelt field must not pass silently
    served                       strict types: no "5" for 5, no true for 1

Fields beyond OpenAI's (`min_tokens`, `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`,
`cache_salt`) are called as vLLM calls them; `timeout` is in seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.chat_template import Message
from twostroke.router.gateway.content import read_messages, read_prompt, read_stop, read_stop_token_ids
from twostroke.router.prepare import GenerateParams, check_params

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field to the values that ask for nothing, null aside."""

MAX_SHOWN = 128
"""Characters of a client's field name that an error repeats."""

Number = Annotated[float, Field(allow_inf_nan=True)]
"""Also an integer. Ranges are checked by `router.prepare`, for HTTP and gRPC alike."""

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ONE_PROMPT = {"anyOf": [{"type": "string"}, _IDS, {"type": "array", "maxItems": 1, "items": {"type": "string"}}]}
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        "name": {"type": "string"},
    },
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: nothing is obfuscated."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: int = 0
    min_p: Number = 0.0
    seed: int | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    n: int = 1
    stop: Annotated[object, WithJsonSchema(_TEXTS)] = None
    stop_token_ids: Annotated[object, WithJsonSchema(_IDS)] = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: str = ""


class CompletionBody(_Body):
    prompt: Annotated[object, WithJsonSchema(_ONE_PROMPT)]


class ChatBody(_Body):
    messages: Annotated[object, WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A body understood, before anything is known of the model."""

    model: str
    prompt: str | list[int] | list[Message]
    params: GenerateParams
    streamed: bool
    include_usage: bool
    salt: str
    max_tokens_field: str = "max_tokens"
    """What the client calls it."""


def parse_completion(body: dict[str, object]) -> Ask:
    """Raises InvalidRequest naming the field."""
    parsed = _validate(CompletionBody, body)
    return _ask(parsed, read_prompt(parsed.prompt), parsed.max_tokens, "max_tokens")


def parse_chat(body: dict[str, object]) -> Ask:
    """Raises InvalidRequest naming the field."""
    parsed = _validate(ChatBody, body)
    max_tokens, field = parsed.max_tokens, "max_tokens"
    if parsed.max_completion_tokens is not None:
        if max_tokens not in (None, parsed.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ", "max_completion_tokens")
        max_tokens, field = parsed.max_completion_tokens, "max_completion_tokens"
    return _ask(parsed, read_messages(parsed.messages), max_tokens, field)


def _ask(body: _Body, prompt: str | list[int] | list[Message], max_tokens: int | None, max_tokens_field: str) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    params = GenerateParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        n=body.n,
        stop=read_stop(body.stop),
        stop_token_ids=read_stop_token_ids(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        timeout_s=body.timeout,
    )
    check_params(params)
    return Ask(
        model=body.model,
        prompt=prompt,
        params=params,
        streamed=body.stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        salt=body.cache_salt,
        max_tokens_field=max_tokens_field,
    )


Body = TypeVar("Body", bound=_Body)


def _validate(kind: type[Body], body: dict[str, object]) -> Body:
    served = kind.model_fields
    kept: dict[str, object] = {}
    for name, value in body.items():
        if name in served:
            if value is not None:
                kept[name] = value
        elif name in UNSERVED:
            if value is not None and not _asks_for_nothing(value, UNSERVED[name]):
                raise InvalidRequest(f"{name} is not supported here", name)
        elif name not in IGNORED:
            shown = name[:MAX_SHOWN]
            raise InvalidRequest(f"unknown field {shown!r}", shown)
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise InvalidRequest(f"{_path(first['loc'])}: {first['msg']}", _path(first["loc"])) from None


def _asks_for_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    # 0 == False in Python, and a client that sends `logprobs: 0` does ask for something.
    return any(type(value) is type(other) and value == other for other in harmless)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:MAX_SHOWN]}" for part in location)
    return text.removeprefix(".")


Parser = Callable[[dict[str, object]], Ask]
