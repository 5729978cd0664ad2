"""A small client of our own HTTP API, on the standard library: for `chat` and the demo. Blocking."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from twostroke.cluster.core.errors import TwostrokeError, Unavailable

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0


class ChatRefused(TwostrokeError):
    """The server answered with an error; the message is its own."""

    code = "chat_refused"


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """New text, and from the last chunk usage and our report of where the time went (empty before)."""

    text: str
    usage: Mapping[str, Any]
    report: Mapping[str, Any]


def stream_chat(
    base_url: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None, temperature: float = 0.0
) -> Iterator[ChatChunk]:
    """Ask for a streamed chat completion. Raises Unavailable when nobody answers, ChatRefused with the reason."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT_S)
        model = _only_model(connection)
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": temperature,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        headers = {"content-type": "application/json", "x-twostroke-report": "1"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ChatRefused(_error_text(response.read()))
        yield from _chunks(response)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{base_url} does not answer: {error}") from None
    finally:
        connection.close()


def workers_ready(address: str) -> tuple[int, int] | None:
    """Prefill and decode workers of the router at host:port; None while it is not ready or does not answer."""
    parts = urlsplit(f"http://{address}")
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        return None
    counts = json.loads(data)
    return int(counts["prefill_workers"]), int(counts["decode_workers"])


def _only_model(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/v1/models")
    response = connection.getresponse()
    data = response.read()
    if response.status != http.HTTPStatus.OK:
        raise ChatRefused(_error_text(data))
    models = json.loads(data)["data"]
    if not models:
        raise Unavailable("the cluster serves no model yet")
    return str(models[0]["id"])


def _chunks(response: http.client.HTTPResponse) -> Iterator[ChatChunk]:
    """Server-sent events to chunks, until `[DONE]`."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatRefused(str(event["error"].get("message", event["error"])))
        text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        yield ChatChunk(text, event.get("usage") or {}, event.get("twostroke") or {})
    raise Unavailable("the stream ended before its end")


def _error_text(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:500]
