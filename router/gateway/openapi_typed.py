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
_OUTPUT_ITEM = object_of(
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    status={"enum": ["in_progress", "completed", "incomplete"]},
    content=list_of(_OUTPUT_TEXT),
)
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
    parallel_tool_calls={"const": True},
    previous_response_id=NULL,
    store={"const": False},
    temperature=NUMBER,
    text=object_of({"verbosity": STRING}, format={"type": "object"}),
    tool_choice={"const": "auto"},
    tools={"type": "array", "maxItems": 0},
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
            type={"enum": ["response.content_part.added", "response.content_part.done"]}, part=_OUTPUT_TEXT, **_IN_ITEM
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

_TEXT_BLOCK = object_of(type={"const": "text"}, text=STRING)
_MESSAGE_USAGE = object_of(
    input_tokens=COUNT,
    cache_creation_input_tokens=COUNT,
    cache_read_input_tokens=COUNT,
    output_tokens=COUNT,
)
_STOP = {
    "stop_reason": or_null({"enum": ["end_turn", "max_tokens", "stop_sequence"]}),
    "stop_sequence": or_null(STRING),
}
_MESSAGE_ANSWER = object_of(
    {"twostroke": REPORT},
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=list_of(_TEXT_BLOCK),
    usage=_MESSAGE_USAGE,
    **_STOP,
)
_MESSAGE_EVENT = {
    "anyOf": [
        object_of(type={"const": "message_start"}, message=ref("Message")),
        object_of(type={"const": "content_block_start"}, index=COUNT, content_block=_TEXT_BLOCK),
        object_of(type={"const": "ping"}),
        object_of(
            type={"const": "content_block_delta"},
            index=COUNT,
            delta=object_of(type={"const": "text_delta"}, text=STRING),
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
        error=object_of(type=STRING, message=STRING, param=or_null(STRING), code=STRING),
        request_id=STRING,
    ),
    "InputTokens": object_of(object={"const": "response.input_tokens"}, input_tokens=COUNT),
    "TokenCount": object_of(input_tokens=COUNT),
}
