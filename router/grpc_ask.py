"""What a call of the gRPC API asks, read by the rules of HTTP: a message becomes the JSON that says the same there,
and what is wrong with that is said of the message's field (`own_names`). Pure.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.grammar import Grammar
from twostroke.cluster.wire.convert import WireError, grammar_from_wire
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.router.ask import Ask, Chat, Prompts
from twostroke.router.content import read_chat_options, read_messages
from twostroke.router.prepare import GenerateParams, check_params
from twostroke.router.reduced import check_prompt_alone, with_best_of
from twostroke.router.tools import check_depth, read_tools

MESSAGES_FIELD = "chat.messages"
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "logprobs",
    "prompt_logprobs",
    "timeout_s",
)
"""Optional fields of the wire that are parameters under the same name."""
_MODES = {
    pb.TOOL_MODE_UNSPECIFIED: "auto",
    pb.TOOL_MODE_NONE: "none",
    pb.TOOL_MODE_AUTO: "auto",
    pb.TOOL_MODE_REQUIRED: "required",
}
_OWN_NAMES = (
    (r"^tool_choice\.function\.name$", "tool_choice.name"),
    (r"^tool_choice\.allowed_tools\.tools(\[\d+\])\.function\.name$", r"tool_choice.allowed.names\1"),
    (r"^tool_choice\.allowed_tools", "tool_choice.allowed"),
    (r"\b(tools|tool_calls)(\[\d+\])\.function\b", r"\1\2"),
    (r"^(?=tools|tool_choice|chat_template_kwargs|continue_final_message)", "chat."),
)
"""Patterns of a field in JSON, each to be replaced in turn."""


def own_name(field: str) -> str:
    """Where the message has what JSON has in `field`."""
    for pattern, ours in _OWN_NAMES:
        field = re.sub(pattern, ours, field)
    return field


@contextmanager
def own_names() -> Iterator[None]:
    """An InvalidRequest from inside names the message's field."""
    try:
        yield
    except InvalidRequest as error:
        error.field = error.field and own_name(error.field)
        raise


def read_generate(request: pb.GenerateRequest, remaining_s: float | None, limits: LimitsSection) -> Ask:
    """`remaining_s` until the call's own deadline. Raises InvalidRequest naming the field."""
    prompt = read_input(request, limits)
    params = _params(request, remaining_s)
    alone = request.HasField("prompt_logprobs") and params.max_tokens == 0
    if alone:
        check_prompt_alone(params.min_tokens)
        params = replace(params, max_tokens=1)
    check_params(params, limits)
    best_of = request.best_of if request.HasField("best_of") else None
    made = with_best_of(params, best_of, limits, continued=bool(request.continuation))
    return Ask(
        model=request.model,
        prompt=prompt,
        params=params if alone else made,
        streamed=True,
        include_usage=True,
        salt=request.cache_salt,
        top=params.logprobs,
        num_shown=params.n,
        prompt_field=MESSAGES_FIELD,
        prompt_alone=alone,
        prompt_top=params.prompt_logprobs,
        continuation=request.continuation or None,
    )


def read_input(request: pb.GenerateRequest | pb.TokenizeRequest, limits: LimitsSection) -> Prompts | Chat:
    """Raises InvalidRequest naming the field."""
    match request.WhichOneof("input"):
        case "text":
            return Prompts([("text", request.text)])
        case "chat":
            return _chat(request.chat, limits)
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            return Prompts([("token_ids", list(request.token_ids.ids))])
    raise InvalidRequest("one of text, token_ids and chat is needed", "input")


def _chat(chat: pb.ChatMessages, limits: LimitsSection) -> Chat:
    with own_names():
        tools = read_tools(
            [_tool(tool, f"tools[{index}]", limits) for index, tool in enumerate(chat.tools)],
            _tool_choice(chat.tool_choice),
            chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
            limits,
        )
        messages = read_messages(
            [_message(message) for message in chat.messages], limits.max_messages, MESSAGES_FIELD, with_tools=True
        )
        asked = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
        try:
            variables = MessageToDict(chat.chat_template_kwargs)
        except ValueError as error:  # a number that JSON has no name for
            raise InvalidRequest(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None
        return Chat(messages, read_chat_options(asked, chat.continue_final_message, variables, tools), tools)


def _message(message: pb.ChatMessage) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.content}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if value := getattr(message, name):
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    return plain


def _tool(tool: pb.Tool, field: str, limits: LimitsSection) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if tool.parameters:
        field = f"{field}.function.parameters"
        try:
            parameters = orjson.loads(tool.parameters)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"parameters are not JSON: {error}", field) from None
        check_depth(parameters, limits.max_json_depth, "parameters", field)
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _tool_choice(choice: pb.ToolChoice) -> object:
    match choice.WhichOneof("choice"):
        case "mode":
            return _mode(choice.mode, "tool_choice.mode")
        case "name":
            return {"type": "function", "function": {"name": choice.name}}
        case "allowed":
            mode = _mode(choice.allowed.mode, "tool_choice.allowed_tools.mode")
            named = [{"type": "function", "function": {"name": name}} for name in choice.allowed.names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return None


def _mode(mode: pb.ToolMode, field: str) -> str:
    if mode not in _MODES:
        raise InvalidRequest(f"unknown mode {mode}", field)
    return _MODES[mode]


def _params(request: pb.GenerateRequest, remaining_s: float | None) -> GenerateParams:
    values: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    if remaining_s is not None and remaining_s < values.get("timeout_s", remaining_s + 1):
        values["timeout_s"] = max(remaining_s, 0.001)
    return GenerateParams(
        **values,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=tuple(request.logit_bias.items()),
        priority=request.priority,
        grammar=_grammar(request),
        grammar_field="grammar",
    )


def _grammar(request: pb.GenerateRequest) -> Grammar | None:
    if not request.HasField("grammar"):
        return None
    try:
        return grammar_from_wire(request.grammar)
    except WireError as error:
        raise InvalidRequest(error.message, "grammar.kind") from None
