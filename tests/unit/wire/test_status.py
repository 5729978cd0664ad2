import json
from pathlib import Path

import grpc
import pytest

from twostroke.cluster.core import errors
from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.wire.status import TABLE, error_metadata, from_http, from_rpc, mapping_of, markdown, to_http

EXAMPLES: list[TwostrokeError] = [
    errors.InvalidRequest("must be positive", "n"),
    errors.ContextOverflow("too long", "messages"),
    errors.UnknownModel("no model x", "model"),
    errors.BodyTooLarge("over 8 MiB"),
    errors.Overloaded("queue full", 2.5),
    errors.Unavailable("no worker", 0.25),
    errors.DeadlineExceeded("late"),
    errors.Cancelled("gone"),
    errors.SlowReader("slow"),
    errors.PeerLost("lost"),
    errors.TransferFailed("bad checksum \u20ac"),
    errors.LayoutMismatch("page_size", 16, 32),
    errors.ConfigError(["a: wrong"]),
    errors.InternalError("broken"),
]


def rpc_error(error: TwostrokeError, details: bool = True) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*error_metadata(error)) if details else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(mapping_of(error).grpc_status, grpc.aio.Metadata(), trailing, error.message)


def test_every_error_has_a_row_and_an_example() -> None:
    def tree(root: type[TwostrokeError]) -> set[type[TwostrokeError]]:
        return {root}.union(*(tree(child) for child in root.__subclasses__()))

    # Only those of core cross the wire; a client may have its own.
    kinds = {kind for kind in tree(TwostrokeError) - {TwostrokeError} if kind.__module__ == TwostrokeError.__module__}
    assert kinds == {row.error for row in TABLE} == {type(error) for error in EXAMPLES}
    assert len({row.code for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_an_error_survives_the_wire(error: TwostrokeError) -> None:
    back = from_rpc(rpc_error(error))
    assert type(back) is type(error)
    for name in ("field", "retry_after_s"):
        assert getattr(back, name, None) == getattr(error, name, None)
    if not isinstance(error, errors.LayoutMismatch):  # its two values come back as text
        assert error.message.removeprefix("invalid configuration:\n") in back.message


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_without_details_the_status_still_gives_the_class(error: TwostrokeError) -> None:
    back = from_rpc(rpc_error(error, details=False))
    if not isinstance(error, errors.LayoutMismatch):
        assert mapping_of(back).grpc_status in (mapping_of(error).grpc_status, grpc.StatusCode.INTERNAL)


def test_http_form() -> None:
    http = to_http(errors.InvalidRequest("must be positive", "messages[0].role"))
    assert http.status == 400
    assert http.body == {
        "error": {
            "message": "must be positive",
            "type": "invalid_request_error",
            "param": "messages[0].role",
            "code": "invalid_request",
        }
    }
    for wait_s, told in ((0.0, "1"), (0.3, "1"), (1.0, "1"), (2.2, "3"), (3.0, "3"), (60.0, "60")):
        assert to_http(errors.Overloaded("full", wait_s)).headers == {"retry-after": told}


def test_the_documentation_is_current() -> None:
    assert (Path(__file__).parents[3] / "docs" / "errors.md").read_text() == markdown()


@pytest.mark.parametrize("error", [error for error in EXAMPLES if error.code not in ("config", "layout_mismatch")])
def test_over_http_and_back(error: TwostrokeError) -> None:
    known = to_http(error)
    back = from_http(known.status, json.dumps(known.body).encode(), known.headers.get("retry-after"))
    assert type(back) is type(error)
    assert back.message == error.message
    if isinstance(error, errors.InvalidRequest):
        assert isinstance(back, errors.InvalidRequest)
        assert back.field == error.field
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        assert isinstance(back, errors.Overloaded | errors.Unavailable)
        assert error.retry_after_s <= back.retry_after_s <= error.retry_after_s + 1.5


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, errors.Overloaded), (503, errors.Unavailable), (504, errors.DeadlineExceeded), (502, errors.PeerLost)]
    + [(418, errors.InvalidRequest), (500, errors.LayoutMismatch), (599, errors.InternalError)],
)
@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {"code": "strange"}}'])
def test_a_foreign_http_error_is_classed_by_its_status(status: int, kind: type[TwostrokeError], data: bytes) -> None:
    found = from_http(status, data, "soon")
    assert type(found) is (errors.InternalError if status == 500 else kind)
