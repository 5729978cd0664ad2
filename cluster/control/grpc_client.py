"""A small client of our own gRPC API, for the demo."""

from collections.abc import AsyncIterator, Mapping, Sequence

import grpc.aio
from google.protobuf.json_format import MessageToDict

from twostroke.cluster.control.client import READ_TIMEOUT_S, ChatChunk
from twostroke.cluster.wire.channel import open_channel
from twostroke.cluster.wire.status import from_rpc
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1 import inference_pb2_grpc


async def stream_chat_grpc(
    address: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float = 0.0
) -> AsyncIterator[ChatChunk]:
    """Ask for a streamed chat answer. Raises the TwostrokeError that the server reports."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        try:
            model = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=READ_TIMEOUT_S)
            request = pb.GenerateRequest(
                model=model.model,
                chat=pb.ChatMessages(
                    messages=[pb.ChatMessage(role=each["role"], content=each["content"]) for each in messages]
                ),
                max_tokens=max_tokens,
                temperature=temperature,
            )
            async for response in stub.Generate(request, timeout=READ_TIMEOUT_S):
                if response.HasField("delta"):
                    yield ChatChunk(response.delta.text, {}, {})
                elif response.HasField("finished"):
                    yield _last_chunk(response.finished)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None


def _last_chunk(finished: pb.Finished) -> ChatChunk:
    counts = {name: getattr(finished, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    report = MessageToDict(finished.report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return ChatChunk("", counts, {**report, **counts})
