"""Reading a JSON body that anybody may have sent: bounded while it is read, with a deadline, strict.

JSON is what RFC 8259 says: UTF-8, no NaN or Infinity, no lone surrogates; and of bounded depth.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.errors import BodyTooLarge, InvalidRequest

T = TypeVar("T")

LARGE_BYTES = 64 << 10
READ_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 1.0


async def read_body(scope: Scope, receive: Receive, config: RouterSection) -> bytearray:
    """At most `max_body_bytes`. Raises BodyTooLarge as soon as that is known, HTTPException (408, 415) or
    ClientDisconnect.
    """
    max_bytes = config.max_body_bytes
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        shown = kind[:64].decode("latin-1")
        raise HTTPException(415, f"the content type must be application/json, not {shown!r}")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None


async def parse_body(data: bytearray, parse: Callable[[dict[str, object]], T], config: RouterSection) -> T:
    """What `parse` makes of the JSON object in a body, of at most `limits.max_json_depth` levels. It is called in a
    thread for a large body: the smallest of pieces, 100,000 of them, take seconds, and streams are to go on meanwhile.

    Raises InvalidRequest.
    """

    def understand() -> T:
        return parse(_object_in(data, config.limits.max_json_depth))

    return await asyncio.to_thread(understand) if len(data) > LARGE_BYTES else understand()


def _object_in(data: bytearray, max_depth: int) -> dict[str, object]:
    """Raises InvalidRequest for anything but one JSON object."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if any(words in str(error).lower() for words in ("depth limit", "recursion limit")):  # orjson's, at 1024
            raise _too_deep(max_depth) from None
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    # Nearly every body is cleared by counting, which runs in C; brackets within strings only cost the longer look.
    is_flat = not any(isinstance(field, dict | list) for field in value.values())
    if not is_flat and data.count(b"{") + data.count(b"[") > max_depth:
        _check_depth(value, max_depth)
    return value


def _check_depth(value: dict[str, object], max_depth: int) -> None:
    """Level by level. Raises InvalidRequest naming the field at the top that is too deep."""
    for name, field in value.items():
        level: list[dict[str, object] | list[object]] = [field] if isinstance(field, dict | list) else []
        for _ in range(max_depth - 1):
            level = [
                inner
                for outer in level
                for inner in (outer.values() if isinstance(outer, dict) else outer)
                if isinstance(inner, dict | list)
            ]
            if not level:
                break
        else:
            raise _too_deep(max_depth, name[:128])


def _too_deep(max_depth: int, field: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"the body is nested over {max_depth} levels deep", field)


async def drain(receive: Receive) -> None:
    """Take what a refused client still sends, for a moment.

    Closing with unread bytes makes the kernel reset the connection, which may destroy the answer on its way.
    """
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _read(receive: Receive, max_bytes: int) -> bytearray:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return data


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is over {max_bytes} bytes")
