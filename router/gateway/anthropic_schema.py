"""The fields of `/v1/messages` and `/v1/messages/count_tokens`, by the rules of `router.gateway.schema`.

`system` becomes the first message, and turns those of a chat (`gateway.anthropic_turns`), so that the same conversation
gives the same prompt over both. `cache_control` is ignored: every prefix is cached anyway.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.ask import Ask, Chat
from twostroke.router.content import read_chat_options, read_stop
from twostroke.router.formats import read_output_config
from twostroke.router.gateway.anthropic_errors import THREAD
from twostroke.router.gateway.anthropic_turns import TEXT_SCHEMA, TURNS_SCHEMA, read_system, read_turns
from twostroke.router.gateway.foreign_tools import MESSAGES_CHOICE, MESSAGES_NAMES, MESSAGES_TOOLS, from_messages
from twostroke.router.gateway.schema import validate, with_form
from twostroke.router.prepare import GenerateParams, check_params
from twostroke.router.renaming import renamed, rewritten
from twostroke.router.tools import read_tools

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
    THREAD: (),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Field to the values that ask for nothing, null aside."""

_TEXTS = {"type": "array", "items": {"type": "string"}}


class CountBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    messages: Annotated[object, WithJsonSchema(TURNS_SCHEMA)]
    system: Annotated[object, WithJsonSchema(TEXT_SCHEMA)] = None
    tools: Annotated[object, WithJsonSchema(MESSAGES_TOOLS)] = None
    tool_choice: Annotated[object, WithJsonSchema(MESSAGES_CHOICE)] = None


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
        )
        params = with_form(params, form)
        check_params(params, limits)
    return Ask(
        model=parsed.model,
        prompt=_conversation(parsed, limits),
        params=params,
        streamed=parsed.stream,
        include_usage=True,
        salt=parsed.cache_salt,
        field_names=MESSAGES_NAMES,
    )


def parse_count(body: dict[str, object], limits: LimitsSection) -> Ask:
    """As much of a request as decides how many tokens its prompt has. Raises InvalidRequest naming the field."""
    parsed = validate(CountBody, body, UNSERVED, IGNORED_IN_COUNTS)
    return Ask(parsed.model, _conversation(parsed, limits), field_names=MESSAGES_NAMES)


def _conversation(body: CountBody, limits: LimitsSection) -> Chat:
    """An answer that the client has begun (a last message of the assistant's) is gone on with."""
    messages = read_turns(body.messages, limits)
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun and "tool_calls" in messages[-1]:
        raise InvalidRequest("a turn that ends with calls cannot be gone on with: send their results", "messages")
    with rewritten(MESSAGES_NAMES):
        tools = read_tools(*from_messages(body.tools, body.tool_choice), limits)
    options = read_chat_options(None, is_begun, None, tools)
    return Chat([*read_system(body.system), *messages], options, tools)
