"""How `/v1/responses` tells an answer: one message item with one text part. Pure.

    response.created, response.in_progress
    response.output_item.added, response.content_part.added
    response.output_text.delta ...
    response.output_text.done, response.content_part.done, response.output_item.done
    response.completed | response.incomplete (max_output_tokens)         or, at any point, response.failed

Events are numbered from 0 without gaps.
"""

from collections.abc import Iterator

from twostroke.cluster.core.errors import Overloaded, TwostrokeError
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.responses_schema import ResponsesAsk
from twostroke.router.gateway.typed_answer import Event, Said
from twostroke.router.request import ChoiceEnd, RequestReport

ID_PREFIX = "resp_"
MESSAGE_PREFIX = "msg_"


class ResponsesTelling:
    """Implements `typed_answer.Telling`."""

    def __init__(self, ask: ResponsesAsk, request_id: str, created: int, *, include_report: bool) -> None:
        """`created` in Unix seconds."""
        self._ask = ask
        self._id = ID_PREFIX + request_id
        self._created = created
        self._include_report = include_report
        self._item_id = MESSAGE_PREFIX + request_id
        self._place: Json = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._sequence = 0

    def begin(self) -> Iterator[Event]:
        started = self._response("in_progress", [])
        yield self._event("response.created", {"response": started})
        yield self._event("response.in_progress", {"response": started})
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        yield self._event("response.content_part.added", {**self._place, "part": _part(Said())})

    def more(self, said: Said) -> Event:
        return self._event("response.output_text.delta", {**self._place, "delta": said.text, "logprobs": said.logprobs})

    def end(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Iterator[Event]:
        whole = self.whole(said, end, report)
        part = _part(said)
        yield self._event("response.output_text.done", {**self._place, "text": said.text, "logprobs": said.logprobs})
        yield self._event("response.content_part.done", {**self._place, "part": part})
        item = self._item(str(whole["status"]), [part])
        yield self._event("response.output_item.done", {"output_index": 0, "item": item})
        yield self._event(f"response.{whole['status']}", {"response": whole})

    def failed(self, said: Said, error: TwostrokeError) -> Iterator[Event]:
        # The API has a short list of codes; `type` carries ours.
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        response = self._response("failed", [self._item("incomplete", [_part(said)])])
        response["error"] = {"code": code, "message": error.message, "param": None, "type": error.code}
        yield self._event("response.failed", {"response": response})

    def whole(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Json:
        is_cut = end.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        response = self._response(status, [self._item(status, [_part(said)])])
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": report.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": report.prompt_tokens + report.completion_tokens,
        }
        if self._include_report:
            response["twostroke"] = report
        return response

    def _event(self, name: str, data: Json) -> Event:
        event = {"type": name, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return name, event

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[Json]) -> Json:
        params = self._ask.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self._ask.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": self._ask.metadata,
            "model": self._ask.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": self._ask.text,
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(said: Said) -> Json:
    return {"type": "output_text", "text": said.text, "annotations": [], "logprobs": said.logprobs}
