"""Chats over gRPC: asked as a body of HTTP asks, and answers as HTTP's messages."""

import json
from typing import Any

from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb

Json = dict[str, Any]
_MODES = {"none": pb.TOOL_MODE_NONE, "auto": pb.TOOL_MODE_AUTO, "required": pb.TOOL_MODE_REQUIRED}


def grpc_chat(body: Json) -> pb.ChatMessages:
    """`messages`, options, tools and what goes with them; the rest of the body is left out."""
    names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "parallel_tool_calls")
    chat = pb.ChatMessages(**{name: body[name] for name in names if name in body})
    chat.messages.extend(_message(message) for message in body["messages"])
    for tool in body.get("tools") or ():
        function = dict(tool["function"])
        if "parameters" in function:
            function["parameters"] = json.dumps(function["parameters"], ensure_ascii=False)
        chat.tools.add(**function)
    if "tool_choice" in body:
        chat.tool_choice.CopyFrom(_choice(body["tool_choice"]))
    return chat


def _choice(asked: str | Json) -> pb.ToolChoice:
    if isinstance(asked, str):
        return pb.ToolChoice(mode=_MODES[asked])
    if asked["type"] == "function":
        return pb.ToolChoice(name=asked["function"]["name"])
    allowed = asked["allowed_tools"]
    names = [tool["function"]["name"] for tool in allowed["tools"]]
    return pb.ToolChoice(allowed=pb.AllowedTools(mode=_MODES[allowed["mode"]], names=names))


def _message(message: Json) -> pb.ChatMessage:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    names = ("role", "name", "reasoning_content", "tool_call_id")
    said = pb.ChatMessage(content=content, **{name: message[name] for name in names if name in message})
    for call in message.get("tool_calls", ()):
        said.tool_calls.add(id=call["id"], **call["function"])
    return said


class GrpcChoice:
    """One choice, of its deltas and its end; checks their order."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[Json] = []
        self.token_ids: list[int] = []
        self.logprobs: list[pb.TokenLogprob] = []
        self.finish_reason = ""
        self.completion_tokens = 0
        self.continuation = ""

    def take(self, delta: pb.Delta) -> None:
        assert not self.finish_reason, "a delta after the choice's end"
        self.text += delta.text
        self.reasoning += delta.reasoning_content
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        for piece in delta.tool_calls:
            assert bool(piece.id) == bool(piece.name) == (piece.index == len(self.calls)), "id and name come first"
            if piece.name:
                self.calls.append({"id": piece.id, "name": piece.name, "arguments": ""})
            assert piece.index == len(self.calls) - 1, "calls come one after the other"
            self.calls[-1]["arguments"] += piece.arguments

    def end(self, end: pb.ChoiceEnd) -> None:
        assert not self.finish_reason, "two ends"
        self.finish_reason = common_pb2.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_").lower()
        self.completion_tokens = end.completion_tokens
        self.continuation = end.continuation
