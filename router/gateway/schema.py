"""The fields of `/v1/chat/completions` and `/v1/completions`, and what a body turns into.

Rules for fields, in this order:

    null                         the same as not sent, for every field that is known
    harmless and not used here   ignored, of the right type (`IGNORED`)
    known to OpenAI, not served  refused, unless the value asks for nothing (`UNSERVED`)
    unknown                      refused: a misspelt field must not pass silently
    served                       strict types: no "5" for 5, no true for 1

Fields beyond OpenAI's (`min_tokens`, `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`,
`cache_salt`, `priority`, `prompt_logprobs`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`)
are called as vLLM calls them; `timeout` is in seconds, `continuation` is `router.continuation`'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.logprobs import MAX_TOP
from twostroke.router.ask import Ask, Chat, Prompts
from twostroke.router.content import (
    MESSAGE_SCHEMA,
    read_chat_options,
    read_messages,
    read_prompts,
    read_stop,
    read_stop_token_ids,
)
from twostroke.router.formats import FORMAT_SCHEMA, OUTPUTS_SCHEMA, Placed, read_form
from twostroke.router.gateway.logprobs import LOGIT_BIAS_SCHEMA, read_logit_bias
from twostroke.router.prepare import MAX_PRIORITY, GenerateParams, check_params, check_range
from twostroke.router.reduced import check_prompt_alone, with_best_of
from twostroke.router.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, read_tools

IGNORED: Mapping[str, type] = {
    "metadata": dict,
    "parallel_tool_calls": bool,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "user": str,
}

UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "store": (False,),
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

_WORDS = {dict: "an object", bool: "true or false", str: "a string"}


def _shown(**bounds: float) -> Any:
    """Bounds for the OpenAPI document. They are checked by `router.prepare`, for HTTP and gRPC alike."""
    return Field(json_schema_extra={**bounds})


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPTS = {"anyOf": [{"type": "string"}, IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, IDS]}}]}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: nothing is obfuscated."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    max_tokens: Annotated[int | None, _shown(minimum=1)] = None
    min_tokens: Annotated[int, _shown(minimum=0)] = 0
    temperature: Annotated[float, _shown(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[float, _shown(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, _shown(minimum=-1)] = 0
    min_p: Annotated[float, _shown(minimum=0, maximum=1)] = 0.0
    seed: Annotated[int | None, _shown(minimum=-(1 << 63), maximum=(1 << 64) - 1)] = None
    presence_penalty: Annotated[float, _shown(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, _shown(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[float, _shown(exclusiveMinimum=0, maximum=10)] = 1.0
    n: Annotated[int, _shown(minimum=1)] = 1
    stop: Annotated[object, WithJsonSchema(_TEXTS)] = None
    stop_token_ids: Annotated[object, WithJsonSchema(IDS)] = None
    ignore_eos: bool = False
    response_format: Annotated[object, WithJsonSchema(FORMAT_SCHEMA)] = None
    structured_outputs: Annotated[object, WithJsonSchema(OUTPUTS_SCHEMA)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: str = ""
    priority: Annotated[int, _shown(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)] = 0
    logit_bias: Annotated[object, WithJsonSchema(LOGIT_BIAS_SCHEMA)] = None
    prompt_logprobs: Annotated[int | None, _shown(minimum=0, maximum=MAX_TOP)] = None
    continuation: str | None = None


class CompletionBody(_Body):
    prompt: Annotated[object, WithJsonSchema(_PROMPTS)]
    max_tokens: Annotated[int | None, _shown(minimum=0)] = None
    best_of: Annotated[int | None, _shown(minimum=1)] = None
    echo: bool = False
    logprobs: Annotated[int | None, _shown(minimum=0, maximum=MAX_TOP)] = None


Messages = Annotated[object, WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA})]
Variables = Annotated[object, WithJsonSchema({"type": "object"})]
Tools = Annotated[object, WithJsonSchema(TOOLS_SCHEMA)]


class ChatBody(_Body):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, _shown(minimum=0, maximum=MAX_TOP)] = 0
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Variables = None
    tools: Tools = None
    tool_choice: Annotated[object, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: Annotated[object, WithJsonSchema({"type": "boolean"})] = None


def parse_completion(body: dict[str, object], limits: LimitsSection) -> Ask:
    """Raises InvalidRequest naming the field."""
    if body.get("logprobs") is False:
        body = {**body, "logprobs": None}
    parsed = validate(CompletionBody, body)
    prompts = Prompts(read_prompts(parsed.prompt, limits.max_choices), parsed.echo)
    alone = parsed.echo and parsed.max_tokens == 0
    if alone:
        check_prompt_alone(parsed.min_tokens)
    ask = _ask(parsed, prompts, limits, 1 if alone else parsed.max_tokens, "max_tokens", parsed.logprobs)
    num_prompts, continued = len(prompts.prompts), parsed.continuation is not None
    if parsed.stream and parsed.best_of is not None and parsed.best_of > parsed.n:
        raise InvalidRequest("which choices are best is known at the end: best_of over n is no stream", "best_of")
    if continued and num_prompts > 1:
        raise InvalidRequest("with a continuation, send only the prompt that its choice answers", "prompt")
    params = with_best_of(ask.params, parsed.best_of, limits, num_prompts=num_prompts, continued=continued)
    if alone:
        params = replace(params, n=parsed.n)
    if parsed.echo:
        prompt_tops = [top for top in (parsed.logprobs, parsed.prompt_logprobs) if top is not None]
        params = replace(params, prompt_logprobs=max(prompt_tops, default=None))
    return replace(ask, params=params, prompt_alone=alone)


def parse_chat(body: dict[str, object], limits: LimitsSection) -> Ask:
    """Raises InvalidRequest naming the field."""
    parsed = validate(ChatBody, body)
    max_tokens, max_tokens_field = parsed.max_tokens, "max_tokens"
    if parsed.max_completion_tokens is not None:
        if max_tokens not in (None, parsed.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ", "max_completion_tokens")
        max_tokens, max_tokens_field = parsed.max_completion_tokens, "max_completion_tokens"
    if parsed.top_logprobs and not parsed.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    check_range("top_logprobs", parsed.top_logprobs, 0, limits.max_logprobs)
    logprobs = parsed.top_logprobs if parsed.logprobs else None
    tools = read_tools(parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls, limits)
    options = read_chat_options(
        parsed.add_generation_prompt, parsed.continue_final_message, parsed.chat_template_kwargs, tools
    )
    chat = Chat(read_messages(parsed.messages, limits.max_messages, with_tools=True), options, tools)
    return _ask(parsed, chat, limits, max_tokens, max_tokens_field, logprobs)


def _ask(
    body: _Body,
    prompt: Prompts | Chat,
    limits: LimitsSection,
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and body.stream and body.continuation is None:
        raise InvalidRequest("prompt_logprobs come with whole answers, not with streams", "prompt_logprobs")
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
        logit_bias=read_logit_bias(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        priority=body.priority,
    )
    params = with_form(params, read_form(body.response_format, body.structured_outputs))
    check_params(params, limits)
    return Ask(
        model=body.model,
        prompt=prompt,
        params=params,
        streamed=body.stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        salt=body.cache_salt,
        top=logprobs,
        num_shown=body.n,
        max_tokens_field=max_tokens_field,
        prompt_top=body.prompt_logprobs,
        continuation=body.continuation,
    )


def with_form(params: GenerateParams, form: Placed | None) -> GenerateParams:
    return params if form is None else replace(params, grammar=form.grammar, grammar_field=form.field)


Body = TypeVar("Body", bound=BaseModel)


def validate(
    kind: type[Body],
    body: dict[str, object],
    unserved: Mapping[str, tuple[object, ...]] = UNSERVED,
    ignored: Mapping[str, type] = IGNORED,
) -> Body:
    """The fields of one endpoint by the rules above. Raises InvalidRequest naming the first that is wrong."""
    served = kind.model_fields
    kept: dict[str, object] = {}
    for name, value in body.items():
        if name in served:
            if value is not None:
                kept[name] = value
        elif name in unserved:
            if value is not None and not _asks_for_nothing(value, unserved[name]):
                raise InvalidRequest(f"{name} is not supported here", name)
        elif name in ignored:
            if value is not None and type(value) is not ignored[name]:
                raise InvalidRequest(f"{name} must be {_WORDS[ignored[name]]}", name)
        else:
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


Parser = Callable[[dict[str, object], LimitsSection], Ask]
