"""The OpenAPI document: what each endpoint takes and answers, written from the same models that check bodies.

Requests: every field that is known, with null where that is the same as not sent; fields that are only taken when they
ask for nothing appear with the values that do. Answers: the pieces of `gateway.forms`, closed, so that a test which
validates real answers against this document notices what is missing here.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from twostroke import __version__
from twostroke.router.gateway.schema import IGNORED, UNSERVED, ChatBody, CompletionBody
from twostroke.router.gateway.tokens import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

Json = dict[str, Any]

_TYPES = {dict: "object", bool: "boolean", str: "string"}
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NULL: Json = {"type": "null"}
_FINISH: Json = {"enum": ["stop", "length"]}


def _object(optional: Mapping[str, Json] | None = None, /, **required: Json) -> Json:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


_NUMBER: Json = {"type": "number"}
_PROMPT_LOGPROBS = {"prompt_logprobs": _or_null(_list(_or_null({"type": "object"})))}
"""With `prompt_logprobs`: of the answer to a chat, of each choice of a completion."""


def _answer(kind: str, choice: Json) -> Json:
    """An answer, or a chunk: a chunk has no usage unless it was asked for, and then null in all but the last."""
    common = {"id": _STRING, "object": {"const": kind}, "created": _COUNT, "model": _STRING}
    report = {"twostroke": {"type": "object", "description": "With `x-twostroke-report: 1`: where the time went."}}
    usage = {"usage": _or_null(_ref("Usage"))}
    return _object({**usage, **report, **_PROMPT_LOGPROBS}, **common, system_fingerprint=_STRING, choices=_list(choice))


_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _or_null(
    _object(content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))), refusal=_NULL)
)
_TEXT_LOGPROBS = _or_null(
    _object(
        tokens=_list(_STRING),
        token_logprobs=_list(_or_null(_NUMBER)),
        top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        text_offset=_list(_COUNT),
    )
)
_DELTA = _object({"role": {"const": "assistant"}, "content": _STRING})
_MESSAGE = _object(role={"const": "assistant"}, content=_STRING, refusal=_NULL)

_ANSWERS: dict[str, Json] = {
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_or_null(_STRING), code=_STRING),
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "ChatCompletion": _answer(
        "chat.completion", _object(index=_COUNT, message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=_FINISH)
    ),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk",
        _object(index=_COUNT, delta=_DELTA, logprobs=_CHAT_LOGPROBS, finish_reason=_or_null(_FINISH)),
    ),
    "Completion": _answer(
        "text_completion",
        _object(_PROMPT_LOGPROBS, index=_COUNT, text=_STRING, logprobs=_TEXT_LOGPROBS, finish_reason=_or_null(_FINISH)),
    ),
    "Model": _object(id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING, max_model_len=_COUNT),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Tokenized": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_STRING))),
    "Detokenized": _object(prompt=_STRING),
    "Live": _object(status={"const": "live"}),
    "Ready": _object(status={"const": "ready"}, prefill_workers=_COUNT, decode_workers=_COUNT),
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


def _body_schema(kind: type[BaseModel], *, generates: bool) -> tuple[Json, dict[str, Json]]:
    """(schema, the schemas it refers to)."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    inner: dict[str, Json] = schema.pop("$defs", {})
    required = schema.get("required", [])
    fields: dict[str, Json] = {}
    for name, field in schema["properties"].items():
        fields[name] = field if name in required or _NULL in field.get("anyOf", []) else _or_null(field)
    if generates:
        fields.update({name: _or_null({"type": _TYPES[kind]}) for name, kind in IGNORED.items()})
        fields.update({name: {"enum": [*values, None]} for name, values in UNSERVED.items() if name not in fields})
    return {**schema, "properties": fields}, inner


_BODIES: dict[str, Json] = {}
for _kind, _generates in (
    (ChatBody, True),
    (CompletionBody, True),
    (TokenizeTextBody, False),
    (TokenizeChatBody, False),
    (DetokenizeBody, False),
):
    _schema, _inner = _body_schema(_kind, generates=_generates)
    _BODIES |= {_kind.__name__: _schema, **_inner}


def _content(kind: str, schema: Json) -> Json:
    return {"content": {kind: {"schema": schema}}}


def _response(description: str, name: str) -> Json:
    return {"description": description, **_content("application/json", _ref(name))}


def _refusals(*statuses: str) -> Json:
    return {status: _response(_REFUSALS[status], "Error") for status in statuses}


def _post(summary: str, body: Json, answer: Json, *statuses: str) -> Json:
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
        "responses": {"200": answer, **_refusals("400", "404", "408", "413", "415", "500", "503", *statuses)},
    }


def _generating(summary: str, body: str, whole: str, chunk: str) -> Json:
    answer = _response("The answer; with `stream` as events, the last of which is `[DONE]`.", whole)
    answer["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": f"`data: ` lines, each a {chunk} (or an Error, and the end)."}
    }
    return _post(summary, _ref(body), answer, "429", "499", "502", "504")


OPERATIONS: dict[str, Json] = {
    "/v1/chat/completions": _generating("Answer a chat", "ChatBody", "ChatCompletion", "ChatCompletionChunk"),
    "/v1/completions": _generating("Go on with one prompt or several", "CompletionBody", "Completion", "Completion"),
    "/tokenize": _post(
        "The ids of a text or a chat",
        {"anyOf": [_ref("TokenizeTextBody"), _ref("TokenizeChatBody")]},
        _response("The ids.", "Tokenized"),
    ),
    "/detokenize": _post("The text of ids", _ref("DetokenizeBody"), _response("The text.", "Detokenized")),
    "/v1/models": {"summary": "The model", "responses": {"200": _response("One, or none yet.", "ModelList")}},
    "/v1/models/{model:path}": {
        "summary": "One model",
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": _STRING}],
        "responses": {"200": _response("The model.", "Model"), **_refusals("400", "404")},
    },
    "/health/live": {"summary": "The process runs", "responses": {"200": _response("Always.", "Live")}},
    "/health/ready": {
        "summary": "A request could be served now",
        "responses": {"200": _response("Yes.", "Ready"), **_refusals("503")},
    },
    "/metrics": {
        "summary": "Prometheus metrics",
        "responses": {"200": {"description": "Text format.", **_content("text/plain", _STRING)}},
    },
}
"""Path, as it is routed, to its operation."""


def describe(app: FastAPI) -> None:
    """Make `/openapi.json` say what this module knows. Call when all routes are there."""
    document = get_openapi(title=app.title, version=__version__, routes=app.routes)
    document.setdefault("components", {})["schemas"] = {**_ANSWERS, **_BODIES}
    app.openapi = lambda: document  # type: ignore[method-assign]
