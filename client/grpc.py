"""The client over gRPC: `twostroke.v1.Inference`.

async with GrpcClient("router:8001") as client:
    answer = await client.generate([Message("user", "Hello")])
"""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import grpc
import grpc.aio

from twostroke.client.asking import AskingClient
from twostroke.client.calls import DEFAULT_TIMEOUT_S, Caller, Ended, Item, Started, encoding
from twostroke.client.types import (
    Ask,
    CallPiece,
    Message,
    ModelInfo,
    Piece,
    Prompt,
    TokenLogprob,
    Tools,
    Usage,
    WorkerLoad,
)
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.logprobs import show_token
from twostroke.cluster.wire.status import from_rpc
from twostroke.proto.v1 import common_pb2, inference_pb2_grpc
from twostroke.proto.v1 import inference_pb2 as pb

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_MODES = {"none": pb.TOOL_MODE_NONE, "auto": pb.TOOL_MODE_AUTO, "required": pb.TOOL_MODE_REQUIRED}


class GrpcClient(AskingClient):
    def __init__(self, address: str, *, caller: Caller | None = None) -> None:
        """`address` is host:port."""
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        super().__init__(caller)

    async def close(self) -> None:
        await self._channel.close(None)

    async def cancel(self, request_id: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Cancel a request of anybody's by its id; False when no such request is live."""

        async def once(left_s: float) -> bool:
            with _own_errors():
                response = await self._stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=left_s)
            return bool(response.cancelled)

        return await self._caller.call(once, timeout_s)

    async def model(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ModelInfo:
        """The model that is served. Raises TwostrokeError: Unavailable while there is none."""
        return await self._caller.call(self._ask_model, timeout_s)

    async def tokenize(self, text: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[int]:
        """The tokens that `generate` would make of text or of a conversation."""
        with encoding():
            request = pb.TokenizeRequest(text=text) if isinstance(text, str) else pb.TokenizeRequest(chat=_chat(text))

        async def once(left_s: float) -> list[int]:
            with _own_errors():
                response = await self._stub.Tokenize(request, timeout=left_s)
            return list(response.token_ids)

        return await self._caller.call(once, timeout_s)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        with encoding():
            request = pb.DetokenizeRequest(token_ids=token_ids)

        async def once(left_s: float) -> str:
            with _own_errors():
                response = await self._stub.Detokenize(request, timeout=left_s)
            return str(response.text)

        return await self._caller.call(once, timeout_s)

    async def loads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[WorkerLoad]:
        """What each worker that the router is attached to last said that it holds."""

        async def once(left_s: float) -> list[WorkerLoad]:
            with _own_errors():
                response = await self._stub.GetLoads(pb.GetLoadsRequest(), timeout=left_s)
            return [
                WorkerLoad(**{name: getattr(load, name) for name in WorkerLoad.__slots__}) for load in response.workers
            ]

        return await self._caller.call(once, timeout_s)

    async def _ask_model(self, left_s: float) -> ModelInfo:
        with _own_errors():
            info = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=left_s)
        return ModelInfo(info.model, info.max_context)

    async def _served(self, left_s: float) -> str:
        if not self._model:
            self._model = (await self._ask_model(left_s)).name
        return self._model

    async def _attempt(self, ask: Ask, left_s: float) -> AsyncGenerator[Item, None]:
        request = _request(ask, ask.model or await self._served(left_s), left_s)
        finish_reason = continuation = ""
        with _own_errors():
            call = self._stub.Generate(request, timeout=left_s)
            try:
                async for response in call:
                    match response.WhichOneof("item"):
                        case "accepted":
                            yield Started(response.accepted.request_id)
                        case "delta":
                            yield _piece(response.delta)
                        case "choice_end":
                            finish_reason = _FINISH.get(response.choice_end.finish_reason, "")
                            continuation = response.choice_end.continuation
                        case "finished":
                            last = response.finished
                            usage = Usage(last.prompt_tokens, last.completion_tokens, last.cached_tokens)
                            yield Ended(finish_reason, usage, continuation)
            finally:
                call.cancel()


def _piece(delta: pb.Delta) -> Piece:
    logprobs = [
        TokenLogprob(
            show_token(entry.token.token),
            entry.token.logprob,
            tuple((show_token(other.token), other.logprob) for other in entry.top),
        )
        for entry in delta.logprobs
    ]
    calls = [CallPiece(part.index, part.id, part.name, part.arguments) for part in delta.tool_calls]
    return Piece(delta.text, tuple(delta.token_ids), tuple(logprobs), delta.reasoning_content, tuple(calls))


def _request(ask: Ask, model: str, left_s: float) -> pb.GenerateRequest:
    values = {name: value for name, value in asdict(ask.sampling).items() if value is not None}
    with encoding():
        request = pb.GenerateRequest(
            model=model, timeout_s=left_s, cache_salt=ask.cache_salt, continuation=ask.continuation, **values
        )
        if isinstance(ask.prompt, str):
            request.text = ask.prompt
        elif ask.prompt and isinstance(ask.prompt[0], Message):
            request.chat.CopyFrom(_chat(ask.prompt))
            if ask.tools is not None:
                _offer(request.chat, ask.tools)
        else:
            request.token_ids.ids.extend(ask.prompt)  # type: ignore[arg-type]  # a mixed list is a TypeError
    return request


def _chat(prompt: Prompt) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[_message(message) for message in prompt])


def _message(message: object) -> pb.ChatMessage:
    if not isinstance(message, Message):
        raise TypeError(f"{type(message).__name__} is no message")
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        reasoning_content=message.reasoning,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
    )


def _offer(chat: pb.ChatMessages, tools: Tools) -> None:
    for tool in tools.offered:
        parameters = "" if tool.parameters is None else json.dumps(tool.parameters, allow_nan=False)
        chat.tools.add(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)
    if tools.allowed:
        chat.tool_choice.allowed.mode = _MODES[tools.mode]
        chat.tool_choice.allowed.names.extend(tools.allowed)
    else:
        chat.tool_choice.mode = _MODES[tools.mode]
    chat.parallel_tool_calls = tools.parallel


@contextmanager
def _own_errors() -> Iterator[None]:
    """What a call ends with, as ours."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None
