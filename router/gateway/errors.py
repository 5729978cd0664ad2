"""Every refusal in the OpenAI error form, `{"error": {"message", "type", "param", "code"}}`; under `/v1/messages` in
Anthropic's (`refusal` asks the path).

A `TwostrokeError` has its status from `cluster.wire.status`; what HTTP itself refuses (routes, methods, media types)
is a Starlette `HTTPException`, whose code comes from the table here.
"""

from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.wire.status import to_http
from twostroke.router.gateway import anthropic_errors

HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
}
"""Stable codes of what HTTP refuses; the only statuses that an HTTPException here has."""


class _JsonResponse(Response):
    def __init__(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        """No `super().__init__`, which takes three times as long to find the same headers."""
        self.background = None
        self.status_code = status
        self.body = body
        self.raw_headers = [
            *((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
        ]


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return _JsonResponse(orjson.dumps(content), status, headers or {})


def error_response(error: TwostrokeError) -> Response:
    known = to_http(error)
    return json_response(known.body, known.status, known.headers)


def refusal(error: TwostrokeError | HTTPException, scope: Scope) -> Response:
    """The answer in the form of the API that was asked."""
    if isinstance(error, TwostrokeError):
        known = to_http(error)
        status, told, headers = known.status, known.body["error"], known.headers
    else:
        status, told, headers = error.status_code, _protocol_error(error), dict(error.headers or {})
    path = scope["path"]
    if path == anthropic_errors.PATH or path.startswith(anthropic_errors.PATH + "/"):
        state = scope.get("state", {})
        request_id = state.get("client_request_id") or state.get("request_id", "")
        return json_response(anthropic_errors.body_of(status, told, request_id), status, headers)
    return json_response({"error": told}, status, headers)


def _protocol_error(error: HTTPException) -> dict[str, str | None]:
    return {
        "message": error.detail,
        "type": "invalid_request_error",
        "param": None,
        "code": HTTP_CODES.get(error.status_code, "http_error"),
    }
