"""How `/v1/messages` tells an answer: one text block. Pure.

    message_start, content_block_start, ping
    content_block_delta ...
    content_block_stop, message_delta (stop reason and usage), message_stop          or, at any point, error

Input tokens are told without those that came from the cache, as Anthropic does. What was cached is known at the end
only: `message_start` counts the whole prompt, `message_delta` has the final figures.
"""

from collections.abc import Iterator

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.gateway.anthropic_errors import error_body
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.typed_answer import Event, Said
from twostroke.router.request import ChoiceEnd, RequestReport

ID_PREFIX = "msg_"


class MessagesTelling:
    """Implements `typed_answer.Telling`."""

    def __init__(self, request_id: str, model: str, num_prompt: int, *, include_report: bool) -> None:
        """`num_prompt` in tokens."""
        self._request_id = request_id
        self._model = model
        self._num_prompt = num_prompt
        self._include_report = include_report

    def begin(self) -> Iterator[Event]:
        message = self._message([], _usage(self._num_prompt, 0, 0))
        yield "message_start", {"type": "message_start", "message": message}
        block = {"type": "text", "text": ""}
        yield "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
        yield "ping", {"type": "ping"}

    def more(self, said: Said) -> Event:
        delta = {"type": "text_delta", "text": said.text}
        return "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}

    def end(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Iterator[Event]:
        yield "content_block_stop", {"type": "content_block_stop", "index": 0}
        delta: Json = {"type": "message_delta", "delta": _stop(end), "usage": _usage_of(report)}
        if self._include_report:
            delta["twostroke"] = report
        yield "message_delta", delta
        yield "message_stop", {"type": "message_stop"}

    def failed(self, said: Said, error: TwostrokeError) -> Iterator[Event]:
        yield "error", error_body(error, self._request_id)

    def whole(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Json:
        message = self._message([{"type": "text", "text": said.text}], _usage_of(report))
        message |= _stop(end)
        if self._include_report:
            message["twostroke"] = report
        return message

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": ID_PREFIX + self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _stop(end: ChoiceEnd) -> Json:
    if end.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if end.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_of(report: RequestReport) -> Json:
    return _usage(report.prompt_tokens - report.cached_tokens, report.cached_tokens, report.completion_tokens)


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
