"""The fields of `/v1/responses`, by the rules of `router.gateway.schema`.

Stateless: a response is not kept, so `store: true`, `previous_response_id` and `conversation` are refused, and the
client sends the whole conversation as `input`, earlier outputs among it as they came.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.logprobs import MAX_TOP
from twostroke.cluster.core.records import dataclass
from twostroke.router.ask import Ask, Chat
from twostroke.router.content import read_chat_options
from twostroke.router.formats import Placed, read_text_format
from twostroke.router.gateway.foreign_tools import RESPONSES_CHOICE, RESPONSES_NAMES, RESPONSES_TOOLS, from_responses
from twostroke.router.gateway.responses_items import INPUT_SCHEMA, read_items
from twostroke.router.gateway.schema import StreamOptions, validate, with_form
from twostroke.router.prepare import GenerateParams, check_params
from twostroke.router.renaming import renamed, rewritten
from twostroke.router.tools import read_tools

IGNORED: Mapping[str, type] = {
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "user": str,
}

IGNORED_IN_COUNTS: Mapping[str, type] = {**IGNORED, "text": dict}
"""A form of the answer changes no prompt."""

UNSERVED: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
}
"""Field to the values that ask for nothing, null aside."""

STATEFUL = ("store", "previous_response_id", "conversation")
MAX_OUTPUT = "max_output_tokens"
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. Reasoning is told as it is, nothing is encrypted."""
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
"""OpenAI's own limits."""

_INCLUDE = {"type": "array", "items": {"enum": list(INCLUDABLE)}}
_TEXT = {
    "type": "object",
    "properties": {
        "format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "name": {"type": "string"},
                "description": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
        "verbosity": {"enum": ["medium", None]},
    },
}
_METADATA = {"type": "object", "maxProperties": MAX_METADATA, "additionalProperties": {"type": "string"}}


class InputTokensBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    input: Annotated[object, WithJsonSchema(INPUT_SCHEMA)]
    instructions: str | None = None
    tools: Annotated[object, WithJsonSchema(RESPONSES_TOOLS)] = None
    tool_choice: Annotated[object, WithJsonSchema(RESPONSES_CHOICE)] = None
    parallel_tool_calls: bool = True


class ResponsesBody(InputTokensBody):
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    include: Annotated[object, WithJsonSchema(_INCLUDE)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    metadata: Annotated[object, WithJsonSchema(_METADATA)] = None
    text: Annotated[object, WithJsonSchema(_TEXT)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: int | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ResponsesAsk(Ask):
    text: dict[str, object] = field(default_factory=dict)
    """As it was sent, for the answer."""
    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    tools: list[object] = field(default_factory=list)
    tool_choice: object = "auto"
    parallel: bool = True


def parse_responses(body: dict[str, object], limits: LimitsSection) -> ResponsesAsk:
    """Raises InvalidRequest naming the field."""
    parsed = _validate(ResponsesBody, body)
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    text, form = _text(parsed.text)
    params = GenerateParams(
        max_tokens=parsed.max_output_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        seed=parsed.seed,
        timeout_s=parsed.timeout,
        logprobs=_logprobs(parsed),
    )
    params = with_form(params, form)
    with renamed({"max_tokens": MAX_OUTPUT, "logprobs": "top_logprobs"}):
        check_params(params, limits)
    return ResponsesAsk(
        model=parsed.model,
        prompt=_conversation(parsed, limits),
        params=params,
        streamed=parsed.stream,
        include_usage=True,
        salt=parsed.cache_salt,
        top=params.logprobs,
        max_tokens_field=MAX_OUTPUT,
        prompt_field="input",
        field_names=RESPONSES_NAMES,
        text=text,
        instructions=parsed.instructions,
        metadata=_metadata(parsed.metadata),
        tools=parsed.tools if isinstance(parsed.tools, list) else [],
        tool_choice="auto" if parsed.tool_choice is None else parsed.tool_choice,
        parallel=parsed.parallel_tool_calls,
    )


def parse_input_tokens(body: dict[str, object], limits: LimitsSection) -> Ask:
    """As much of a request as decides how many tokens its prompt has. Raises InvalidRequest naming the field."""
    parsed = _validate(InputTokensBody, body, IGNORED_IN_COUNTS)
    return Ask(parsed.model, _conversation(parsed, limits), prompt_field="input", field_names=RESPONSES_NAMES)


Body = TypeVar("Body", bound=InputTokensBody)


def _validate(kind: type[Body], body: dict[str, object], ignored: Mapping[str, type] = IGNORED) -> Body:
    for name in STATEFUL:
        if body.get(name) not in (None, False):
            raise InvalidRequest(
                f"nothing is stored here, so {name} cannot be served; send the whole conversation as input", name
            )
    return validate(kind, body, UNSERVED, ignored)


def _conversation(body: InputTokensBody, limits: LimitsSection) -> Chat:
    messages = read_items(body.input, limits)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    with rewritten(RESPONSES_NAMES):
        tools = read_tools(*from_responses(body.tools, body.tool_choice, body.parallel_tool_calls), limits)
    return Chat(messages, read_chat_options(None, False, None, tools), tools)


def _text(value: object) -> tuple[dict[str, object], Placed | None]:
    """The field as the answer repeats it, and the form that it asks for."""
    text = {} if value is None else value
    if not isinstance(text, dict):
        raise InvalidRequest("text must be an object", "text")
    for name in text:
        if name not in ("format", "verbosity"):
            raise InvalidRequest("this field of text is not supported here", f"text.{name[:128]}")
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidRequest("verbosity can only be medium here", "text.verbosity")
    sent = {name: text[name] for name in text if text[name] is not None}
    return {"format": {"type": "text"}} | sent, read_text_format(text.get("format"))


def _logprobs(body: ResponsesBody) -> int | None:
    """How many alternatives; None when no log-probabilities are asked for."""
    include = [] if body.include is None else body.include
    if not isinstance(include, list):
        raise InvalidRequest("include must be a list", "include")
    for index, name in enumerate(include):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include may name {' and '.join(INCLUDABLE)} here", f"include[{index}]")
    if LOGPROBS in include:
        return body.top_logprobs
    if body.top_logprobs:
        raise InvalidRequest(f"top_logprobs needs include to name {LOGPROBS}", "top_logprobs")
    return None


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidRequest(f"metadata must be an object of at most {MAX_METADATA} strings", "metadata")
    for name, text in value.items():
        if not 1 <= len(name) <= MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"a name in metadata has at most {MAX_METADATA_KEY} characters, a value is a string of at most "
                f"{MAX_METADATA_VALUE}",
                f"metadata.{name[:MAX_METADATA_KEY]}",
            )
    return value
