"""How `/v1/messages` tells an answer: blocks of thinking, text and tool use. Pure.

    message_start, ping
    of each block: content_block_start, content_block_delta ..., content_block_stop
    message_delta (stop reason and usage), message_stop          or, at any point, error

Input tokens are told without those that came from the cache, as Anthropic does. What was cached is known at the end
only: `message_start` counts the whole prompt, `message_delta` has the final figures. Thinking has no signature here.
"""

import json
from collections.abc import Callable, Sequence

import orjson
from pydantic_core import from_json

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.answer_parts import Content, Part
from twostroke.router.gateway.anthropic_errors import error_body
from twostroke.router.gateway.blocks import Block, Blocks, Kind, Step
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.typed_answer import Event
from twostroke.router.request import ChoiceEnd, RequestReport

ID_PREFIX = "msg_"


class MessagesTelling:
    """Implements `typed_answer.Telling`."""

    def __init__(
        self,
        request_id: str,
        model: str,
        num_prompt: int,
        call_id: Callable[[int], str],
        *,
        include_report: bool,
    ) -> None:
        """`num_prompt` in tokens; `call_id` names a call by its number."""
        self._request_id = request_id
        self._model = model
        self._num_prompt = num_prompt
        self._call_id = call_id
        self._include_report = include_report
        self._blocks = Blocks()
        self._end: Json = {}
        """Of the message: what is known at its end."""

    def begin(self) -> Sequence[Event]:
        usage = _usage(self._num_prompt, 0, 0)
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message), _event("ping")]

    def more(self, part: Part, logprobs: Sequence[object]) -> Sequence[Event]:
        return self._tell(self._blocks.take(part))

    def end(self, logprobs: Sequence[object], end: ChoiceEnd, report: RequestReport) -> Sequence[Event]:
        events = [] if self._blocks.all else self._tell(self._blocks.take(Content("")))
        closed = self._blocks.close()
        if closed is not None:
            events.append(_event("content_block_stop", index=closed.index))
        stop, usage = self._stop(end), _usage_of(report)
        self._end = {**stop, "usage": usage}
        told: Json = {"delta": stop, "usage": usage}
        if self._include_report:
            self._end["twostroke"] = told["twostroke"] = report
        return [*events, _event("message_delta", **told), _event("message_stop")]

    def failed(self, error: TwostrokeError) -> Sequence[Event]:
        return [("error", error_body(error, self._request_id))]

    def whole(self) -> Json:
        return self._message([self._whole_block(block) for block in self._blocks.all]) | self._end

    def _tell(self, step: Step) -> list[Event]:
        events: list[Event] = []
        if step.closed is not None:
            events.append(_event("content_block_stop", index=step.closed.index))
        if step.opened is not None:
            block = self._begun_block(step.opened)
            events.append(_event("content_block_start", index=step.opened.index, content_block=block))
        if step.text:
            events.append(_event("content_block_delta", index=step.block.index, delta=_delta(step)))
        return events

    def _begun_block(self, block: Block) -> Json:
        match block.kind:
            case Kind.REASONING:
                return {"type": "thinking", "thinking": "", "signature": ""}
            case Kind.TEXT:
                return {"type": "text", "text": ""}
            case Kind.CALL:
                return {"type": "tool_use", "id": self._call_id(block.number), "name": block.name, "input": {}}

    def _whole_block(self, block: Block) -> Json:
        begun = self._begun_block(block)
        match block.kind:
            case Kind.REASONING:
                return {**begun, "thinking": block.text}
            case Kind.TEXT:
                return {**begun, "text": block.text}
            case Kind.CALL:
                return {**begun, "input": _input(block.text)}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": ID_PREFIX + self._request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _stop(self, end: ChoiceEnd) -> Json:
        if end.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if end.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": "tool_use" if self._blocks.has_calls else "end_turn", "stop_sequence": None}


def _event(name: str, /, **data: object) -> Event:
    return name, {"type": name, **data}


def _delta(step: Step) -> Json:
    match step.block.kind:
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": step.text}
        case Kind.TEXT:
            return {"type": "text_delta", "text": step.text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": step.text}


def _input(arguments: str) -> object:
    """The arguments as an object, as the client of a stream reads them: what is whole of them, where the answer was cut
    within them; empty, where the model wrote no JSON.
    """
    try:
        value = from_json(arguments, allow_partial=True, allow_inf_nan=False)
        # By `json`, which knows integers of any size.
        return orjson.Fragment(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else {}
    except ValueError:
        return {}


def _usage_of(report: RequestReport) -> Json:
    return _usage(report.prompt_tokens - report.cached_tokens, report.cached_tokens, report.completion_tokens)


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
