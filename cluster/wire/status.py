"""One table from our errors to what a client or peer sees of them, and back.

HTTP: `to_http` gives the status and the error body in the OpenAI form. gRPC: `abort_with` ends a call with the
status and its `google.rpc` details (ErrorInfo with the stable code, BadRequest with the field, RetryInfo);
`from_rpc` and `from_http` rebuild the error on the other end. `docs/errors.md` is printed from this table
(`markdown()`).
"""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from twostroke.cluster.core.errors import (
    BodyTooLarge,
    Cancelled,
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    PeerLost,
    SlowReader,
    TransferFailed,
    TwostrokeError,
    Unavailable,
    UnknownModel,
)

DOMAIN = "twostroke"
_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Mapping:
    error: type[TwostrokeError]
    grpc_status: grpc.StatusCode
    http_status: int
    openai_type: str
    meaning: str

    @property
    def code(self) -> str:
        return self.error.code


_CLIENT = "invalid_request_error"
_SERVER = "server_error"
_S = grpc.StatusCode
TABLE: tuple[Mapping, ...] = (
    Mapping(InvalidRequest, _S.INVALID_ARGUMENT, 400, _CLIENT, "A field of the request is wrong; `param` names it."),
    Mapping(ContextOverflow, _S.INVALID_ARGUMENT, 400, _CLIENT, "Prompt, or prompt and max_tokens, over the context."),
    Mapping(UnknownModel, _S.INVALID_ARGUMENT, 404, _CLIENT, "No such model is served here; the field is `model`."),
    Mapping(BodyTooLarge, _S.OUT_OF_RANGE, 413, _CLIENT, "The body is over the limit."),
    Mapping(
        Overloaded, _S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "A queue is full; come back after Retry-After."
    ),
    Mapping(Unavailable, _S.UNAVAILABLE, 503, _SERVER, "No worker can serve this now."),
    Mapping(DeadlineExceeded, _S.DEADLINE_EXCEEDED, 504, "timeout_error", "The request's own time ran out."),
    Mapping(Cancelled, _S.CANCELLED, 499, "cancelled_error", "The request was cancelled."),
    Mapping(SlowReader, _S.ABORTED, 499, "slow_reader_error", "The client read too slowly and was cut."),
    Mapping(PeerLost, _S.UNAVAILABLE, 502, _SERVER, "Workers were lost more often than the attempts allow."),
    Mapping(TransferFailed, _S.UNAVAILABLE, 502, _SERVER, "KV pages did not arrive, or arrived wrong."),
    Mapping(LayoutMismatch, _S.FAILED_PRECONDITION, 500, _SERVER, "Two workers cannot exchange pages."),
    Mapping(ConfigError, _S.FAILED_PRECONDITION, 500, _SERVER, "A configuration is wrong."),
    Mapping(InternalError, _S.INTERNAL, 500, _SERVER, "An invariant of ours broke; please report it."),
)
_BY_CODE = {row.code: row for row in TABLE}
_BY_STATUS: dict[grpc.StatusCode, type[TwostrokeError]] = {}
for _row in TABLE:
    _BY_STATUS.setdefault(_row.grpc_status, _row.error)
_BY_HTTP: dict[int, type[TwostrokeError]] = {}
for _row in TABLE:
    _BY_HTTP.setdefault(_row.http_status, _row.error)
MAX_RETRY_AFTER_S = 3600.0


def mapping_of(error: TwostrokeError) -> Mapping:
    """The row of an error; a subclass without a code of its own has its parent's."""
    return _BY_CODE[error.code]


@dataclass(frozen=True, slots=True)
class HttpError:
    status: int
    body: dict[str, dict[str, str | None]]
    headers: dict[str, str]


def to_http(error: TwostrokeError) -> HttpError:
    """Status, OpenAI error body and extra headers."""
    row = mapping_of(error)
    field = error.field if isinstance(error, InvalidRequest) else None
    body = {"error": {"message": error.message, "type": row.openai_type, "param": field, "code": error.code}}
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return HttpError(row.http_status, body, headers)


def status_proto(error: TwostrokeError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error."""
    row = mapping_of(error)
    status = status_pb2.Status(code=row.grpc_status.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)
    if isinstance(error, LayoutMismatch):
        info.metadata.update(field=error.field, ours=str(error.ours), theirs=str(error.theirs))
    status.details.add().Pack(info)
    if isinstance(error, InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Unavailable):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_metadata(error: TwostrokeError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata that carries the details, as gRPC's richer error model has it."""
    return ((_DETAILS_KEY, status_proto(error).SerializeToString()),)


async def abort_with(context: "grpc.aio.ServicerContext[object, object]", error: TwostrokeError) -> NoReturn:
    """End the call with this error. Never returns."""
    await context.abort(mapping_of(error).grpc_status, error.message, error_metadata(error))


def from_rpc(error: grpc.aio.AioRpcError) -> TwostrokeError:
    """The error that a call failed with; a foreign one is classed by its status."""
    message = error.details() or error.code().name
    # The stubs take Metadata for a sequence; it iterates over (key, value).
    for key, value in cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ()):
        if key == _DETAILS_KEY:
            return _from_status(status_pb2.Status.FromString(cast(bytes, value)), error.code(), message)
    return _plain(_BY_STATUS.get(error.code(), InternalError), message, None, 1.0)


def from_http(status: int, data: bytes, retry_after: str | None) -> TwostrokeError:
    """The error of an HTTP answer: its body in the OpenAI form, and its Retry-After. A foreign one by its status."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    error = from_http_body(body, _BY_HTTP.get(status, InvalidRequest if status < 500 else InternalError))
    if retry_after is not None and isinstance(error, Overloaded | Unavailable):
        with suppress(ValueError):  # a date: nobody of ours sends one
            error.retry_after_s = min(max(0.0, float(retry_after)), MAX_RETRY_AFTER_S)
    return error


def from_http_body(body: object, otherwise: type[TwostrokeError] = InternalError) -> TwostrokeError:
    """The error that an error body, or an error event of a stream, tells of."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return _plain(otherwise, "an error without a body that says more", None, 1.0)
    row = _BY_CODE.get(str(told.get("code")))
    field = told.get("param")
    kind = row.error if row is not None else otherwise
    return _plain(kind, str(told.get("message")), field if isinstance(field, str) else None, 1.0)


def _from_status(status: status_pb2.Status, code: grpc.StatusCode, message: str) -> TwostrokeError:
    kind = _BY_STATUS.get(code, InternalError)
    field = None
    retry_after_s = 1.0
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in _BY_CODE:
            kind = _BY_CODE[info.reason].error
            if kind is LayoutMismatch:
                return LayoutMismatch(info.metadata["field"], info.metadata["ours"], info.metadata["theirs"])
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return _plain(kind, message, field, retry_after_s)


def _plain(kind: type[TwostrokeError], message: str, field: str | None, retry_after_s: float) -> TwostrokeError:
    if issubclass(kind, InvalidRequest):
        return kind(message, field)
    if issubclass(kind, Overloaded | Unavailable):
        return kind(message, retry_after_s)
    if issubclass(kind, ConfigError):
        return ConfigError([message])
    return InternalError(message) if issubclass(kind, LayoutMismatch) else kind(message)


def markdown() -> str:
    """`docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Printed by `python -m twostroke.cluster.wire.status > docs/errors.md`; do not edit.",
        "",
        'HTTP answers `{"error": {"message", "type", "param", "code"}}`. In a stream that has begun, the same object',
        "is sent as a `data:` event and the stream closes, without a finish reason and without `[DONE]`. gRPC carries",
        "`code` as `ErrorInfo.reason`, the field as `BadRequest.field_violations[0].field`, and `RetryInfo`.",
        "`/v1/messages` answers in Anthropic's form, with the same `code` and `param` in its `error`, a stream",
        "ends with an `error` event, one of `/v1/responses` with `response.failed`, whose `error.type` is the `code`.",
        "",
        "| code | HTTP | type | gRPC | retryable | meaning |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.code}` | {row.http_status} | `{row.openai_type}` | `{row.grpc_status.name}` "
        f"| {'yes' if row.error.retryable else 'no'} | {row.meaning} |"
        for row in TABLE
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
