"""Schemas of what `/v1/responses` and `/v1/messages` answer, whole and as events."""

from twostroke.router.gateway.json_schema import (
    COUNT,
    NULL,
    NUMBER,
    REPORT,
    STRING,
    Json,
    list_of,
    object_of,
    or_null,
    ref,
)

_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": list_of(COUNT)}
_LOGPROBS = list_of(object_of(**_TOKEN, top_logprobs=list_of(object_of(**_TOKEN))))
_OUTPUT_TEXT = object_of(
    type={"const": "output_text"},
    text=STRING,
    annotations=list_of({"type": "object"}),
    logprobs=_LOGPROBS,
)
_REASONING_TEXT = object_of(type={"const": "reasoning_text"}, text=STRING)
_STATUS: Json = {"enum": ["in_progress", "completed", "incomplete"]}
_OUTPUT_ITEM: Json = {
    "anyOf": [
        object_of(
            id=STRING,
            type={"const": "message"},
            role={"const": "assistant"},
            status=_STATUS,
            content=list_of(_OUTPUT_TEXT),
        ),
        object_of(
            id=STRING,
            type={"const": "reasoning"},
            status=_STATUS,
            summary={"type": "array", "maxItems": 0},
            content=list_of(_REASONING_TEXT),
        ),
        object_of(
            id=STRING,
            type={"const": "function_call"},
            status=_STATUS,
            call_id=STRING,
            name=STRING,
            arguments=STRING,
        ),
    ]
}
_RESPONSE_USAGE = object_of(
    input_tokens=COUNT,
    input_tokens_details=object_of(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=object_of(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
_RESPONSE = object_of(
    {"twostroke": REPORT},
    id=STRING,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
    background={"const": False},
    error=or_null(object_of(code=STRING, message=STRING, param=NULL, type=STRING)),
    incomplete_details=or_null(object_of(reason={"const": "max_output_tokens"})),
    instructions=or_null(STRING),
    max_output_tokens=or_null(COUNT),
    metadata={"type": "object", "additionalProperties": STRING},
    model=STRING,
    output=list_of(_OUTPUT_ITEM),
    parallel_tool_calls={"type": "boolean"},
    previous_response_id=NULL,
    store={"const": False},
    temperature=NUMBER,
    text=object_of({"verbosity": STRING}, format={"type": "object"}),
    tool_choice={"type": ["string", "object"]},
    tools=list_of({"type": "object"}),
    top_logprobs=COUNT,
    top_p=NUMBER,
    truncation={"const": "disabled"},
    usage=or_null(_RESPONSE_USAGE),
)
_PLACE = {"sequence_number": COUNT, "output_index": COUNT}
_IN_ITEM = {**_PLACE, "item_id": STRING, "content_index": COUNT}
_RESPONSE_EVENT = {
    "anyOf": [
        object_of(
            type={
                "enum": [f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")]
            },
            sequence_number=COUNT,
            response=ref("Response"),
        ),
        object_of(
            type={"enum": ["response.output_item.added", "response.output_item.done"]}, item=_OUTPUT_ITEM, **_PLACE
        ),
        object_of(
            type={"enum": ["response.content_part.added", "response.content_part.done"]},
            part={"anyOf": [_OUTPUT_TEXT, _REASONING_TEXT]},
            **_IN_ITEM,
        ),
        object_of(type={"const": "response.reasoning_text.delta"}, delta=STRING, **_IN_ITEM),
        object_of(type={"const": "response.reasoning_text.done"}, text=STRING, **_IN_ITEM),
        object_of(type={"const": "response.function_call_arguments.delta"}, delta=STRING, item_id=STRING, **_PLACE),
        object_of(
            type={"const": "response.function_call_arguments.done"},
            name=STRING,
            arguments=STRING,
            item_id=STRING,
            **_PLACE,
        ),
        object_of(
            type={"const": "response.output_text.delta"},
            delta=STRING,
            logprobs=_LOGPROBS,
            **_IN_ITEM,
        ),
        object_of(
            type={"const": "response.output_text.done"},
            text=STRING,
            logprobs=_LOGPROBS,
            **_IN_ITEM,
        ),
    ]
}

_BLOCK: Json = {
    "anyOf": [
        object_of(type={"const": "text"}, text=STRING),
        object_of(type={"const": "thinking"}, thinking=STRING, signature=STRING),
        object_of(type={"const": "tool_use"}, id=STRING, name=STRING, input={"type": "object"}),
    ]
}
_BLOCK_DELTA: Json = {
    "anyOf": [
        object_of(type={"const": "text_delta"}, text=STRING),
        object_of(type={"const": "thinking_delta"}, thinking=STRING),
        object_of(type={"const": "input_json_delta"}, partial_json=STRING),
    ]
}
_MESSAGE_USAGE = object_of(
    input_tokens=COUNT,
    cache_creation_input_tokens=COUNT,
    cache_read_input_tokens=COUNT,
    output_tokens=COUNT,
)
_STOP = {
    "stop_reason": or_null({"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}),
    "stop_sequence": or_null(STRING),
}
_MESSAGE_ANSWER = object_of(
    {"twostroke": REPORT},
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=list_of(_BLOCK),
    usage=_MESSAGE_USAGE,
    **_STOP,
)
_MESSAGE_EVENT = {
    "anyOf": [
        object_of(type={"const": "message_start"}, message=ref("Message")),
        object_of(type={"const": "content_block_start"}, index=COUNT, content_block=_BLOCK),
        object_of(type={"const": "ping"}),
        object_of(
            type={"const": "content_block_delta"},
            index=COUNT,
            delta=_BLOCK_DELTA,
        ),
        object_of(type={"const": "content_block_stop"}, index=COUNT),
        object_of(
            {"twostroke": REPORT}, type={"const": "message_delta"}, delta=object_of(**_STOP), usage=_MESSAGE_USAGE
        ),
        object_of(type={"const": "message_stop"}),
        ref("MessageError"),
    ]
}

TYPED_ANSWERS: dict[str, Json] = {
    "Response": _RESPONSE,
    "ResponseEvent": _RESPONSE_EVENT,
    "Message": _MESSAGE_ANSWER,
    "MessageEvent": _MESSAGE_EVENT,
    "MessageError": object_of(
        type={"const": "error"},
        error=object_of(
            {"details": {"type": "object"}}, type=STRING, message=STRING, param=or_null(STRING), code=STRING
        ),
        request_id=STRING,
    ),
    "InputTokens": object_of(object={"const": "response.input_tokens"}, input_tokens=COUNT),
    "TokenCount": object_of(input_tokens=COUNT),
}
