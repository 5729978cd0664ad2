"""The OpenAPI document: what each endpoint takes and answers, written from the same models that check bodies.

Requests: every field that is known, with null where that is the same as not sent; fields that are only taken when they
ask for nothing appear with the values that do. Answers: the pieces of `gateway.forms`, closed, so that a test which
validates real answers against this document notices what is missing here.
"""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from twostroke import __version__
from twostroke.router.gateway import anthropic_schema, responses_schema
from twostroke.router.gateway.anthropic_schema import CountBody, MessagesBody
from twostroke.router.gateway.errors import json_response
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
from twostroke.router.gateway.openapi_typed import TYPED_ANSWERS
from twostroke.router.gateway.responses_schema import InputTokensBody, ResponsesBody
from twostroke.router.gateway.schema import IGNORED, UNSERVED, ChatBody, CompletionBody
from twostroke.router.gateway.tokens import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

_TYPES = {dict: "object", bool: "boolean", str: "string"}
_FINISH: Json = {"enum": ["stop", "length"]}
_CHAT_FINISH: Json = {"enum": ["stop", "length", "tool_calls"]}
_PROMPT_LOGPROBS = {"prompt_logprobs": or_null(list_of(or_null({"type": "object"})))}
"""With `prompt_logprobs`: of the answer to a chat, of each choice of a completion."""
_CONTINUATION: Json = {
    "continuation": {
        "type": "string",
        "description": "When the server's output budget ended the choice: send it with the same request to go on.",
    }
}


def _answer(kind: str, choice: Json) -> Json:
    """An answer, or a chunk: a chunk has no usage unless it was asked for, and then null in all but the last."""
    common = {"id": STRING, "object": {"const": kind}, "created": COUNT, "model": STRING}
    usage = {"usage": or_null(ref("Usage"))}
    return object_of(
        {**usage, "twostroke": REPORT, **_PROMPT_LOGPROBS}, **common, system_fingerprint=STRING, choices=list_of(choice)
    )


_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": list_of(COUNT)}
_CHAT_LOGPROBS = or_null(
    object_of(content=list_of(object_of(**_TOKEN, top_logprobs=list_of(object_of(**_TOKEN)))), refusal=NULL)
)
_TEXT_LOGPROBS = or_null(
    object_of(
        tokens=list_of(STRING),
        token_logprobs=list_of(or_null(NUMBER)),
        top_logprobs=list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
        text_offset=list_of(COUNT),
    )
)
_CALL: dict[str, Json] = {"id": STRING, "type": {"const": "function"}}
_CALL_PART = object_of({**_CALL, "function": object_of({"name": STRING}, arguments=STRING)}, index=COUNT)
_REASONING: dict[str, Json] = {"reasoning_content": STRING}
_DELTA = object_of({"role": {"const": "assistant"}, "content": STRING, "tool_calls": list_of(_CALL_PART), **_REASONING})
_MESSAGE = object_of(
    {"tool_calls": list_of(object_of(**_CALL, function=object_of(name=STRING, arguments=STRING))), **_REASONING},
    role={"const": "assistant"},
    content=or_null(STRING),
    refusal=NULL,
)


_ANSWERS: dict[str, Json] = {
    **TYPED_ANSWERS,
    "Error": object_of(
        error=object_of(message=STRING, type=STRING, param=or_null(STRING), code=STRING),
    ),
    "Usage": object_of(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=object_of(cached_tokens=COUNT),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        object_of(_CONTINUATION, index=COUNT, message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=_CHAT_FINISH),
    ),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk",
        object_of(
            _CONTINUATION, index=COUNT, delta=_DELTA, logprobs=_CHAT_LOGPROBS, finish_reason=or_null(_CHAT_FINISH)
        ),
    ),
    "Completion": _answer(
        "text_completion",
        object_of(
            {**_PROMPT_LOGPROBS, **_CONTINUATION},
            index=COUNT,
            text=STRING,
            logprobs=_TEXT_LOGPROBS,
            finish_reason=or_null(_FINISH),
        ),
    ),
    "Model": object_of(id=STRING, object={"const": "model"}, created=COUNT, owned_by=STRING, max_model_len=COUNT),
    "ModelList": object_of(object={"const": "list"}, data=list_of(ref("Model"))),
    "Tokenized": object_of(
        count=COUNT, max_model_len=COUNT, tokens=list_of(COUNT), token_strs=or_null(list_of(STRING))
    ),
    "Detokenized": object_of(prompt=STRING),
    "Live": object_of(status={"const": "live"}),
    "Ready": object_of(status={"const": "ready"}, prefill_workers=COUNT, decode_workers=COUNT),
}

_REFUSALS = {
    "400": "A field is wrong; `param` names it.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is over the limit.",
    "415": "The body is not JSON.",
    "429": "A queue is full; see `Retry-After`.",
    "499": "The request was cancelled.",
    "500": "An invariant broke.",
    "502": "Workers were lost.",
    "503": "No worker can serve this now; see `Retry-After`.",
    "504": "The request's own time ran out.",
}


def _body_schema(
    kind: type[BaseModel], ignored: Mapping[str, type], unserved: Mapping[str, tuple[object, ...]]
) -> tuple[Json, dict[str, Json]]:
    """(schema, the schemas it refers to)."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    inner: dict[str, Json] = schema.pop("$defs", {})
    required = schema.get("required", [])
    fields: dict[str, Json] = {}
    for name, field in schema["properties"].items():
        fields[name] = field if name in required or NULL in field.get("anyOf", []) else or_null(field)
    fields.update({name: or_null({"type": _TYPES[kind]}) for name, kind in ignored.items()})
    fields.update({name: {"enum": [*values, None]} for name, values in unserved.items() if name not in fields})
    return {**schema, "properties": fields}, inner


_BODIES: dict[str, Json] = {}
_FOREIGN: tuple[tuple[type[BaseModel], Mapping[str, type], Mapping[str, tuple[object, ...]]], ...] = (
    (ChatBody, IGNORED, UNSERVED),
    (CompletionBody, IGNORED, UNSERVED),
    (ResponsesBody, responses_schema.IGNORED, responses_schema.UNSERVED),
    (InputTokensBody, responses_schema.IGNORED_IN_COUNTS, responses_schema.UNSERVED),
    (MessagesBody, anthropic_schema.IGNORED, anthropic_schema.UNSERVED),
    (CountBody, anthropic_schema.IGNORED_IN_COUNTS, anthropic_schema.UNSERVED),
    (TokenizeTextBody, {}, {}),
    (TokenizeChatBody, {}, {}),
    (DetokenizeBody, {}, {}),
)
"""A body with the fields that it takes beside its own: those that are ignored, and those that may ask for nothing."""
for _kind, _ignored, _unserved in _FOREIGN:
    _schema, _inner = _body_schema(_kind, _ignored, _unserved)
    _BODIES |= {_kind.__name__: _schema, **_inner}


def _content(kind: str, schema: Json) -> Json:
    return {"content": {kind: {"schema": schema}}}


def _response(description: str, name: str) -> Json:
    return {"description": description, **_content("application/json", ref(name))}


def _refusals(*statuses: str, form: str = "Error") -> Json:
    return {status: _response(_REFUSALS[status], form) for status in statuses}


_ANYWHERE = ("400", "404", "408", "413", "415", "500", "503")
_WHEN_GENERATING = ("429", "499", "502", "504")


def _post(summary: str, body: Json, answer: Json, *statuses: str, form: str = "Error") -> Json:
    """`form`: the schema of refusals."""
    request_id = {
        "name": "x-request-id",
        "in": "header",
        "description": "The client's own id: comes back in the same header and in the answer's `id`.",
        "schema": {"type": "string", "maxLength": 128},
    }
    return {
        "summary": summary,
        "parameters": [request_id],
        "requestBody": {"required": True, **_content("application/json", body)},
        "responses": {"200": answer, **_refusals(*_ANYWHERE, *statuses, form=form)},
    }


def _embedded(content: Json) -> Json:
    """JSON within the text of an event's data."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": content}


def _generating(summary: str, body: str, whole: str, chunk: str) -> Json:
    answer = _response("The answer; with `stream` as events, the last of which is `[DONE]`.", whole)
    told = f"`data` alone, each a {chunk} (or an Error, and the end)."
    data = {"anyOf": [{"const": "[DONE]"}, _embedded({"anyOf": [ref(chunk), ref("Error")]})]}
    event = object_of({"event": {"const": "message"}}, data=data)  # what an event without a name is called
    answer["content"]["text/event-stream"] = {"itemSchema": {"description": told, **event}}
    return _post(summary, ref(body), answer, *_WHEN_GENERATING)


def _telling(summary: str, body: str, whole: str, last: str, form: str) -> Json:
    """An endpoint whose stream is of events with names; `last` is what a failure is told by."""
    answer = _response("The answer; with `stream` as events.", whole)
    told = f"The data is a {whole}Event, and the event's name its `type`; a failure is the last, {last}."
    event = object_of(event=STRING, data=_embedded(ref(f"{whole}Event")))
    answer["content"]["text/event-stream"] = {"itemSchema": {"description": told, **event}}
    return _post(summary, ref(body), answer, *_WHEN_GENERATING, form=form)


OPERATIONS: dict[str, Json] = {
    "/v1/chat/completions": _generating("Answer a chat", "ChatBody", "ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": _generating("Go on with one prompt or several", "CompletionBody", "Completion", "Completion"),
    "/v1/responses": _telling(
        "Answer a chat (nothing is stored)", "ResponsesBody", "Response", "`response.failed`", "Error"
    ),
    "/v1/responses/input_tokens": _post(
        "The length of a chat's prompt", ref("InputTokensBody"), _response("In tokens.", "InputTokens")
    ),
    "/v1/messages": _telling("Answer a chat", "MessagesBody", "Message", "`error`", "MessageError"),
    "/v1/messages/count_tokens": _post(
        "The length of a chat's prompt", ref("CountBody"), _response("In tokens.", "TokenCount"), form="MessageError"
    ),
    "/tokenize": _post(
        "The ids of a text or a chat",
        {"anyOf": [ref("TokenizeTextBody"), ref("TokenizeChatBody")]},
        _response("The ids.", "Tokenized"),
    ),
    "/detokenize": _post("The text of ids", ref("DetokenizeBody"), _response("The text.", "Detokenized")),
    "/v1/models": {"summary": "The model", "responses": {"200": _response("One, or none yet.", "ModelList")}},
    "/v1/models/{model:path}": {
        "summary": "One model",
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": STRING}],
        "responses": {"200": _response("The model.", "Model"), **_refusals("400", "404")},
    },
    "/health/live": {"summary": "The process runs", "responses": {"200": _response("Always.", "Live")}},
    "/health/ready": {
        "summary": "A request could be served now",
        "responses": {"200": _response("Yes.", "Ready"), **_refusals("503")},
    },
    "/metrics": {
        "summary": "Prometheus metrics",
        "responses": {"200": {"description": "Text format.", **_content("text/plain", STRING)}},
    },
}
"""Path, as it is routed, to its operation."""


class Description:
    """`/openapi.json` of these routes, each of which must be in `OPERATIONS`."""

    def __init__(self, routes: Iterable[Route]) -> None:
        paths: dict[str, Json] = {}
        for route in routes:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                name = f"{method.lower()}_{route.name}"
                paths.setdefault(route.path_format, {})[method.lower()] = {
                    "operationId": name,
                    **OPERATIONS[route.path],
                }
        self.document: Json = {
            "openapi": "3.2.0",  # the first to tell of each event of a stream (`itemSchema`)
            "info": {"title": "twostroke", "version": __version__},
            "paths": paths,
            "components": {"schemas": {**_ANSWERS, **_BODIES}},
        }

    async def answer(self, request: Request) -> Response:
        return json_response(self.document)
