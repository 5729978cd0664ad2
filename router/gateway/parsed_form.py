"""A chat answer with parts: text, reasoning and tool calls, whole and as chunks. Made for one request.

whole     message.content (null where there are only calls), reasoning_content, tool_calls
chunk     a delta with whatever has become certain; none while nothing has
finish    `tool_calls` where the model called of its own accord, or because some call was required
"""

from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.answer_parts import Call, Parsed
from twostroke.router.apart import Apart
from twostroke.router.gateway.forms import ChatForm, Json


class ParsedChatForm(ChatForm):
    is_plain = False

    def __init__(self, apart: Apart) -> None:
        self._apart = apart

    def whole_choice(self, index: int, text: str, finish: FinishReason, logprobs: Json | None) -> Json:
        parsed = self._apart.take(index, text, is_last=True)
        content = None if parsed.calls and not parsed.content else parsed.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [self._call(index, number, call) for number, call in enumerate(parsed.calls)]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(index, finish)}

    def chunk_choice(
        self, index: int, text: str, finish: FinishReason | None, logprobs: Json | None, *, is_first: bool
    ) -> Json | None:
        delta = self._delta(index, self._apart.take(index, text, is_last=finish is not None))
        if is_first:
            delta = {"role": "assistant", "content": "", **delta}
        # Log-probabilities of text that is held back are told all the same: the parser does not know which they are.
        if not delta and finish is None and logprobs is None:
            return None
        reason = None if finish is None else self._reason(index, finish)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, parsed: Parsed) -> Json:
        delta: Json = {}
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.reasoning:
            delta["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            delta["tool_calls"] = [
                {"index": number, **self._call(index, number, call)}
                if call.name
                else {"index": number, "function": {"arguments": call.arguments}}
                for number, call in enumerate(parsed.calls, parsed.first)
            ]
        return delta

    def _call(self, index: int, number: int, call: Call) -> Json:
        return {
            "id": self._apart.call_id(index, number),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _reason(self, index: int, finish: FinishReason) -> str:
        return "tool_calls" if self._apart.ends_with_calls(index, finish) else finish.value
