"""Reading a JSON body that anybody may have sent: bounded while it is read, with a deadline, strict.

JSON is what RFC 8259 says: UTF-8, no NaN or Infinity, no lone surrogates, at most 1024 levels (orjson's limits).
"""

import asyncio

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from twostroke.cluster.core.errors import BodyTooLarge, InvalidRequest

READ_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = 1.0


async def read_object(scope: Scope, receive: Receive, max_bytes: int) -> dict[str, object]:
    """The JSON object in the body.

    Raises InvalidRequest, BodyTooLarge as soon as that is known, HTTPException (408, 415) or ClientDisconnect.
    """
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
            data = await _read(receive, max_bytes)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    return parse_object(data)


def parse_object(data: bytes | bytearray) -> dict[str, object]:
    """Raises InvalidRequest for anything but one JSON object."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


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
