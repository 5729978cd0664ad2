"""The client over HTTP: `/v1/chat/completions` for conversations, `/v1/completions` for text and token ids.

async with HttpClient("http://router:8000") as client:
    answer = await client.generate([Message("user", "Hello")])
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import httpx

from twostroke.client.asking import AskingClient
from twostroke.client.calls import DEFAULT_TIMEOUT_S, Caller, Ended, Item, Started, encoding
from twostroke.client.types import Ask, CallPiece, Message, ModelInfo, Piece, Prompt, TokenLogprob, Tools, Usage
from twostroke.cluster.core.errors import DeadlineExceeded, InternalError, PeerLost, Unavailable
from twostroke.cluster.wire.status import from_http, from_http_body

CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 8 << 20
_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class HttpClient(AskingClient):
    def __init__(self, base_url: str, *, api_key: str = "", caller: Caller | None = None) -> None:
        """`base_url` without `/v1`. With an `api_key`, it is sent as a bearer token."""
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers)
        super().__init__(caller)

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ModelInfo:
        """The model that is served. Raises TwostrokeError: Unavailable while there is none."""
        return await self._caller.call(self._ask_model, timeout_s)

    async def tokenize(self, text: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[int]:
        """The tokens that `generate` would make of text or of a conversation."""
        body = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
        answer = await self._caller.call(lambda left_s: self._ask("POST", "/tokenize", left_s, body), timeout_s)
        with _own_errors():
            return [int(token) for token in answer["tokens"]]

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        body = {"tokens": list(token_ids)}
        answer = await self._caller.call(lambda left_s: self._ask("POST", "/detokenize", left_s, body), timeout_s)
        with _own_errors():
            return str(answer["prompt"])

    async def _ask(self, method: str, path: str, left_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = None if body is None else _content(body)
        with _own_errors():
            response = await self._http.request(method, path, content=content, timeout=_timeout(left_s))
            if response.status_code != httpx.codes.OK:
                raise from_http(response.status_code, response.content, response.headers.get("retry-after"))
            return dict(response.json())

    async def _ask_model(self, left_s: float) -> ModelInfo:
        models = await self._ask("GET", "/v1/models", left_s)
        with _own_errors():
            if not models["data"]:
                raise Unavailable("no model is served yet")
            [model, *_] = models["data"]
            return ModelInfo(str(model["id"]), int(model["max_model_len"]))

    async def _attempt(self, ask: Ask, left_s: float) -> AsyncGenerator[Item, None]:
        if not ask.model and not self._model:
            self._model = (await self._ask_model(left_s)).name
        path, content = _request(ask, ask.model or self._model, left_s)
        with _own_errors():
            async with self._http.stream("POST", path, content=content, timeout=_timeout(left_s)) as response:
                if response.status_code != httpx.codes.OK:
                    data = await response.aread()
                    raise from_http(response.status_code, data, response.headers.get("retry-after"))
                yield Started(response.headers.get("x-twostroke-request-id", ""))
                finish_reason = continuation = ""
                async for event in _events(response):
                    for choice in event["choices"]:
                        finish_reason = choice["finish_reason"] or finish_reason
                        continuation = choice.get("continuation", "")
                        piece = _piece(choice, ask.sampling.logprobs)
                        if piece != Piece(""):
                            yield piece
                    if event.get("usage"):
                        yield Ended(finish_reason, _usage(event["usage"]), continuation)


def _request(ask: Ask, model: str, left_s: float) -> tuple[str, bytes]:
    """Path and body."""
    sampling = asdict(ask.sampling)
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timeout": max(left_s, 0.001),
        **{name: value for name, value in sampling.items() if value is not None and value != ()},
    }
    if ask.cache_salt:
        body["cache_salt"] = ask.cache_salt
    if ask.continuation:
        body["continuation"] = ask.continuation
    if isinstance(ask.prompt, str):
        return "/v1/completions", _content({**body, "prompt": ask.prompt})
    if ask.prompt and isinstance(ask.prompt[0], Message):
        if ask.sampling.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": ask.sampling.logprobs}
        if ask.tools is not None:
            body |= _tools(ask.tools)
        return "/v1/chat/completions", _content({**body, "messages": list(ask.prompt)})
    return "/v1/completions", _content({**body, "prompt": list(ask.prompt)})


def _content(body: dict[str, Any]) -> bytes:
    with encoding():
        return json.dumps(body, allow_nan=False, default=_plain).encode()


def _plain(value: object) -> dict[str, Any]:
    if not isinstance(value, Message):
        raise TypeError(f"{type(value).__name__} is no part of a request")
    told: dict[str, Any] = {"reasoning_content": value.reasoning, "tool_call_id": value.tool_call_id}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in value.tool_calls
    ]
    if calls:
        told["tool_calls"] = calls
    return {"role": value.role, "content": value.content, **{name: told[name] for name in told if told[name]}}


def _tools(tools: Tools) -> dict[str, Any]:
    choice: object = tools.mode
    if tools.allowed:
        named = [{"type": "function", "function": {"name": name}} for name in tools.allowed]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": tools.mode, "tools": named}}
    offered = [{"type": "function", "function": asdict(tool)} for tool in tools.offered]
    return {"tools": offered, "tool_choice": choice, "parallel_tool_calls": tools.parallel}


def _piece(choice: dict[str, Any], num_top: int | None) -> Piece:
    """What a chunk tells of a choice; nothing, maybe."""
    delta = choice.get("delta", choice)
    calls = [
        CallPiece(
            part["index"], part.get("id", ""), part["function"].get("name", ""), part["function"].get("arguments", "")
        )
        for part in delta.get("tool_calls", ())
    ]
    text = delta.get("content") if "delta" in choice else choice["text"]
    logprobs = _logprobs(choice.get("logprobs"), num_top)
    return Piece(text or "", (), logprobs, delta.get("reasoning_content", ""), tuple(calls))


def _logprobs(told: dict[str, Any] | None, num_top: int | None) -> tuple[TokenLogprob, ...]:
    """Of a chat's choice, or of a completion's, whose likeliest may have the token itself as one more."""
    if told is None:
        return ()
    if "content" in told:
        return tuple(
            TokenLogprob(
                entry["token"],
                entry["logprob"],
                tuple((other["token"], other["logprob"]) for other in entry["top_logprobs"]),
            )
            for entry in told["content"]
        )
    entries = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    return tuple(TokenLogprob(token, logprob, tuple(top.items())[:num_top]) for token, logprob, top in entries)


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens", 0))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Data of each event until `[DONE]`. Raises the error that an event holds, PeerLost at an early end.

    By hand, since `aiter_lines` also breaks at U+2028 and others, which JSON strings may hold as they are.
    """
    waiting = bytearray()
    async for data in response.aiter_bytes():
        waiting += data
        *frames, rest = waiting.split(_END)
        waiting = bytearray(rest)
        if len(waiting) > MAX_EVENT_BYTES:
            raise InternalError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")
        for frame in frames:
            if not frame.startswith(_DATA):
                continue  # a comment, which keeps a connection alive
            content = frame.removeprefix(_DATA)
            if content == _DONE:
                return
            event = json.loads(content)
            if "error" in event:
                raise from_http_body(event)
            yield event
    raise PeerLost("the stream ended before its end")


def _timeout(left_s: float) -> httpx.Timeout:
    return httpx.Timeout(max(left_s, 0.001), connect=min(max(left_s, 0.001), CONNECT_TIMEOUT_S))


@contextmanager
def _own_errors() -> Iterator[None]:
    """What httpx raises, as ours."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise Unavailable(f"the router cannot be reached: {error}") from error
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(f"the router did not answer in time: {error!r}") from error
    except httpx.TransportError as error:
        raise PeerLost(f"the connection to the router broke: {error!r}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise InternalError(f"the answer is not a router's: {error!r}") from error
