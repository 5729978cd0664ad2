"""Every refusal under `/v1/messages` in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`.

Statuses and headers are those of `cluster.wire.status`; `error` also has our `code` and `param`, as the OpenAI form.
"""

from collections.abc import Mapping

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.wire.status import to_http

PATH = "/v1/messages"
"""Requests to this path and below it are answered in this form."""

THREAD = "thread"
"""The field that asks the server to keep the conversation. Clients go on without it when its refusal has the details
that they look for: so does the tool runner of Anthropic's own package.
"""

_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: TwostrokeError, request_id: str) -> dict[str, object]:
    known = to_http(error)
    return body_of(known.status, known.body["error"], request_id)


def body_of(status: int, error: Mapping[str, str | None], request_id: str) -> dict[str, object]:
    """From the `error` object of the OpenAI form. The message names the field, since this API has no place for it."""
    message, field = error["message"] or "", error["param"]
    if field and field not in message:
        message = f"{field}: {message}"
    told: dict[str, object] = {
        "type": error_type(status),
        "message": message,
        "param": field,
        "code": error["code"],
    }
    if field == THREAD:
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    return {"type": "error", "error": told, "request_id": request_id}
