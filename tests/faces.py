"""A routed cluster behind its real faces: HTTP under uvicorn and gRPC, both on 127.0.0.1; and answers one can compare.

    async with faces(routed, tokenizer) as served:
        answer = await served.http(COMPLETION, body)
        other = await served.grpc(pb.GenerateRequest(...))

Answers of a kind have one shape: a stream is put together into what the whole answer would be, and its framing is
checked on the way. Token ids, which HTTP does not tell, are noted between gateway and dispatcher.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import orjson
from prometheus_client import CollectorRegistry

from tests.gateway_server import CHAT, events, serving
from tests.grpc_chats import GrpcChoice
from tests.routed_cluster import RoutedCluster
from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.channel import bind, new_server, open_channel
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from twostroke.router.gateway.app import create_app
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.request import (
    Delta,
    GenerateRequest,
    Generator,
    RequestStream,
    ServedModel,
    StreamItem,
    WorkerLoad,
)
from twostroke.router.tokenizer import Tokenizer

TIMEOUT_S = 300.0
"""The demo model on a busy machine takes minutes for all that it is asked at once; tests have limits of their own."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int | str
    """HTTP's number, or gRPC's name."""
    body: Json
    """What the client reads, without what differs between any two requests."""
    items: tuple[tuple[StreamItem, ...], ...] = ()
    """What the dispatcher said, of each prompt."""

    @property
    def tokens(self) -> list[list[int]]:
        """Of each choice, of each prompt in turn."""
        found: list[list[int]] = []
        for items in self.items:
            of_choice: dict[int, list[int]] = {}
            for item in items:
                if isinstance(item, Delta):
                    of_choice.setdefault(item.choice, []).extend(item.token_ids)
            found += [of_choice[choice] for choice in sorted(of_choice)]
        return found


class Recorder:
    """Implements `router.request.Generator` by another one, and notes what its streams say, by request id."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self._items: dict[RequestId, list[StreamItem]] = {}

    def submit(self, request: GenerateRequest) -> RequestStream:
        stream = self._inner.submit(request)
        return _Recorded(stream, self._items.setdefault(request.request_id, []))

    def take(self, own_id: str) -> tuple[tuple[StreamItem, ...], ...]:
        """Once: of each prompt of the request with this id."""
        ids = [own_id] if own_id in self._items else []
        while f"{own_id}-{len(ids)}" in self._items:
            ids.append(f"{own_id}-{len(ids)}")
        return tuple(tuple(self._items.pop(RequestId(request_id))) for request_id in ids)

    def cancel(self, request_id: RequestId) -> bool:
        return self._inner.cancel(request_id)

    def loads(self) -> list[WorkerLoad]:
        return self._inner.loads()

    @property
    def model(self) -> ServedModel | None:
        return self._inner.model

    @property
    def ready(self) -> bool:
        return self._inner.ready

    @property
    def num_live(self) -> int:
        return self._inner.num_live


class _Recorded:
    def __init__(self, inner: RequestStream, items: list[StreamItem]) -> None:
        self._inner = inner
        self._items = items

    async def cancel(self) -> None:
        await self._inner.cancel()

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        async with aclosing(aiter(self._inner)) as items:
            async for item in items:
                self._items.append(item)
                yield item


@dataclass
class Faces:
    """Made by `faces`."""

    client: aiohttp.ClientSession
    stub: InferenceStub
    recorder: Recorder

    async def http(self, path: str, body: Json) -> Answer:
        async with self.client.post(path, json=body) as response:
            data = await response.read()
        items = self.recorder.take(response.headers["x-twostroke-request-id"])
        if response.content_type == "text/event-stream":
            return Answer(response.status, join_events(events(data), path == CHAT), items)
        whole = orjson.loads(data)
        for choice in whole.get("choices", ()):
            for call in choice.get("message", {}).get("tool_calls", ()):
                del call["id"]  # made of the request's
        return Answer(response.status, {name: whole[name] for name in whole if name not in ("id", "created")}, items)

    async def grpc(self, request: pb.GenerateRequest) -> Answer:
        read = GrpcAnswer()
        try:
            async for message in self.stub.Generate(request, timeout=TIMEOUT_S):
                read.take(message)
        except grpc.aio.AioRpcError as error:
            return Answer(error.code().name, {"details": error.details()}, self.recorder.take(read.request_id))
        return Answer("OK", read.body(), self.recorder.take(read.request_id))


@asynccontextmanager
async def faces(routed: RoutedCluster, tokenizer: Tokenizer, **config: Any) -> AsyncIterator[Faces]:
    """`config` changes RouterSection."""
    recorder = Recorder(routed.dispatcher)
    section = RouterSection(**config)
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "fake")
    server, gate = new_server(), GrammarGate()
    await gate.open()
    servicer = InferenceServicer(recorder, tokenizer, section, metrics, gate)
    add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    app = create_app(recorder, tokenizer, section, metrics, registry, gate=gate)
    async with (
        serving(app) as (_, http_port),
        aiohttp.ClientSession(
            f"http://127.0.0.1:{http_port}",
            timeout=aiohttp.ClientTimeout(TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        ) as client,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield Faces(client, InferenceStub(channel), recorder)  # type: ignore[no-untyped-call]
    await server.stop(None)
    await gate.close()


# ------------------------------------------------------------------------------------------ streams put together


@dataclass
class _Choice:
    text: str = ""
    finish: str | None = None
    roles: list[str] = field(default_factory=list)
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: Json | None = None
    continuation: Json = field(default_factory=dict)

    def take(self, part: Json, is_chat: bool) -> None:
        assert self.finish is None, f"a chunk after the finish reason: {part}"
        if is_chat:
            delta = part["delta"]
            assert delta.keys() <= {"role", "content", "reasoning_content", "tool_calls"}, delta
            if "role" in delta:
                assert not self.roles, "the role twice"
                assert not self.text, "text before the role"
                self.roles.append(delta["role"])
            self.text += delta.get("content", "")
            self.reasoning += delta.get("reasoning_content", "")
            for piece in delta.get("tool_calls", ()):
                self._take_call(piece)
        else:
            self.text += part["text"]
        if part["logprobs"] is not None:
            self.logprobs = extend(self.logprobs, part["logprobs"])
        self.finish = part["finish_reason"]
        self.continuation = {name: part[name] for name in ("continuation",) if name in part}

    def _take_call(self, piece: Json) -> None:
        assert piece["index"] in (len(self.calls) - 1, len(self.calls)), "calls come one after the other"
        if piece["index"] == len(self.calls):
            self.calls.append({"type": piece["type"], "function": dict(piece["function"])})
        else:
            self.calls[-1]["function"]["arguments"] += piece["function"]["arguments"]

    def whole(self, index: int, is_chat: bool) -> Json:
        assert self.finish is not None, f"choice {index} has no finish reason"
        end = {"logprobs": self.logprobs, "finish_reason": self.finish, **self.continuation}
        if not is_chat:
            return {"index": index, "text": self.text, **end}
        assert self.roles == ["assistant"]
        content = None if self.calls and not self.text else self.text
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {"index": index, "message": message, **end}


def extend(told: Json | None, part: Json) -> Json:
    """Columns of log-probabilities, continued."""
    if told is None:
        return dict(part)
    return {name: value + part[name] if isinstance(value, list) else value for name, value in told.items()}


def join_events(chunks: Sequence[Any], is_chat: bool) -> Json:
    """The whole answer that a stream amounts to; `usage` is in it when the stream told it. Checks the order."""
    *chunks, last = chunks
    if isinstance(last, dict):
        assert "error" in last, "a stream ends with [DONE] or an error"
        return last
    assert last == "[DONE]"
    choices: dict[int, _Choice] = {}
    answer: Json = {}
    for chunk in chunks:
        assert "usage" not in answer or answer["usage"] is None, "a chunk after the usage"
        answer |= {name: chunk[name] for name in ("model", "system_fingerprint", "usage") if name in chunk}
        for part in chunk["choices"]:
            choices.setdefault(part["index"], _Choice()).take(part, is_chat)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    answer["object"] = "chat.completion" if is_chat else "text_completion"
    answer["choices"] = [choices[index].whole(index, is_chat) for index in sorted(choices)]
    return answer


class GrpcAnswer:
    """The messages of one call as one object; checks their order."""

    def __init__(self) -> None:
        self.request_id = ""
        self.choices: dict[int, GrpcChoice] = {}
        self._prompt: list[Json] | None = None
        self._usage: Json | None = None

    def take(self, message: pb.GenerateResponse) -> None:
        assert self._usage is None, "a message after Finished"
        kind = message.WhichOneof("item")
        assert (kind == "accepted") == (not self.request_id), "Accepted comes first and once"
        if kind == "accepted":
            self.request_id = message.accepted.request_id
        elif kind == "prompt_logprobs":
            assert not self.choices, "the prompt's log-probabilities come first"
            self._prompt = [_told(value) for value in message.prompt_logprobs.logprobs]
        elif kind == "delta":
            self.choices.setdefault(message.delta.choice, GrpcChoice()).take(message.delta)
        elif kind == "choice_end":
            self.choices.setdefault(message.choice_end.choice, GrpcChoice()).end(message.choice_end)
        else:
            end = message.finished
            self._usage = {
                "prompt_tokens": end.prompt_tokens,
                "completion_tokens": end.completion_tokens,
                "cached_tokens": end.cached_tokens,
            }

    def body(self) -> Json:
        assert self._usage is not None, "no Finished"
        choices = []
        for _, choice in sorted(self.choices.items()):
            # Ids are made of the request's.
            calls = [{"name": call["name"], "arguments": call["arguments"]} for call in choice.calls]
            logprobs = [_told(value) for value in choice.logprobs]
            told = {**vars(choice), "calls": calls, "logprobs": logprobs}
            choices.append({name: told[name] for name in told if name != "continuation" or told[name]})
        return {"choices": choices, "prompt_logprobs": self._prompt, "usage": self._usage}


def _told(value: pb.TokenLogprob) -> Json:
    top = [{"token": other.token, "logprob": other.logprob} for other in value.top]
    return {"token": value.token.token, "logprob": value.token.logprob, "rank": value.rank, "top_logprobs": top}
