"""Every refusal in the OpenAI error form: `{"error": {"message", "type", "param", "code"}}`.

A `TwostrokeError` has its status from `cluster.wire.status`; what HTTP itself refuses (routes, methods, media types)
is a Starlette `HTTPException`, whose code comes from the table here.
"""

from collections.abc import Mapping

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.wire.status import to_http

HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
}
"""Stable codes of what HTTP refuses; the only statuses that an HTTPException here has."""


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: TwostrokeError) -> Response:
    known = to_http(error)
    return json_response(known.body, known.status, known.headers)


def protocol_error_response(error: HTTPException) -> Response:
    body = {
        "message": error.detail,
        "type": "invalid_request_error",
        "param": None,
        "code": HTTP_CODES.get(error.status_code, "http_error"),
    }
    return json_response({"error": body}, error.status_code, error.headers)
