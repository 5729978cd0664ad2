"""How `/v1/responses` tells an answer: items of reasoning, text and function calls. Pure.

    response.created, response.in_progress
    of each item: response.output_item.added, response.output_item.done, and between them
        a message      content_part.added, output_text.delta ..., output_text.done, content_part.done
        reasoning      the same with reasoning_text
        a call         function_call_arguments.delta ..., function_call_arguments.done
    response.completed | response.incomplete (max_output_tokens)         or, at any point, response.failed

Events are numbered from 0 without gaps.
"""

from collections.abc import Callable, Sequence

from twostroke.cluster.core.errors import Overloaded, TwostrokeError
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.answer_parts import Content, Part
from twostroke.router.gateway.blocks import Block, Blocks, Kind, Step
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.responses_schema import ResponsesAsk
from twostroke.router.gateway.typed_answer import Event
from twostroke.router.request import ChoiceEnd, RequestReport

ID_PREFIX = "resp_"
_ITEM_PREFIXES = {Kind.REASONING: "rs_", Kind.TEXT: "msg_", Kind.CALL: "fc_"}
_PARTS = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text"}


class ResponsesTelling:
    """Implements `typed_answer.Telling`."""

    def __init__(
        self,
        ask: ResponsesAsk,
        request_id: str,
        created: int,
        call_id: Callable[[int], str],
        *,
        include_report: bool,
    ) -> None:
        """`created` in Unix seconds; `call_id` names a call by its number."""
        self._ask = ask
        self._request_id = request_id
        self._created = created
        self._call_id = call_id
        self._include_report = include_report
        self._blocks = Blocks()
        self._sequence = 0
        self._whole: Json = {}

    def begin(self) -> Sequence[Event]:
        started = self._response("in_progress", [])
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def more(self, part: Part, logprobs: Sequence[object]) -> Sequence[Event]:
        return self._tell(self._blocks.take(part, logprobs), logprobs)

    def end(self, logprobs: Sequence[object], end: ChoiceEnd, report: RequestReport) -> Sequence[Event]:
        events = [] if self._blocks.all else self._tell(self._blocks.take(Content("")), ())
        is_cut = end.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        closed = self._blocks.close()
        if closed is not None:
            if closed.kind is Kind.TEXT:
                closed.logprobs.extend(logprobs)
            events += self._done(closed, status)
        self._whole = self._response(status, self._items(status)) | {"usage": _usage(report)}
        if is_cut:
            self._whole["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._include_report:
            self._whole["twostroke"] = report
        return [*events, self._event(f"response.{status}", response=self._whole)]

    def failed(self, error: TwostrokeError) -> Sequence[Event]:
        # The API has a short list of codes; `type` carries ours.
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        response = self._response("failed", self._items("incomplete"))
        response["error"] = {"code": code, "message": error.message, "param": None, "type": error.code}
        return [self._event("response.failed", response=response)]

    def whole(self) -> Json:
        return self._whole

    def _tell(self, step: Step, logprobs: Sequence[object]) -> list[Event]:
        events = [] if step.closed is None else self._done(step.closed, "completed")
        block = step.block
        if step.opened is not None:
            item = self._item(block, "in_progress", begun=True)
            events.append(self._event("response.output_item.added", output_index=block.index, item=item))
            if block.kind is not Kind.CALL:
                part = _part(Block(block.kind, block.index, block.number))
                events.append(self._event("response.content_part.added", **self._place(block), part=part))
        if not step.text:
            return events
        if block.kind is Kind.CALL:
            events.append(self._event("response.function_call_arguments.delta", **self._place(block), delta=step.text))
        else:
            told = {"logprobs": list(logprobs)} if block.kind is Kind.TEXT else {}
            events.append(
                self._event(f"response.{_PARTS[block.kind]}.delta", **self._place(block), delta=step.text, **told)
            )
        return events

    def _done(self, block: Block, status: str) -> list[Event]:
        place, text = self._place(block), block.text
        events: list[Event] = []
        if block.kind is Kind.CALL:
            name = "response.function_call_arguments.done"
            events.append(self._event(name, **place, name=block.name, arguments=text))
        else:
            told = {"logprobs": block.logprobs} if block.kind is Kind.TEXT else {}
            events.append(self._event(f"response.{_PARTS[block.kind]}.done", **place, text=text, **told))
            events.append(self._event("response.content_part.done", **place, part=_part(block)))
        done = self._item(block, status)
        return [*events, self._event("response.output_item.done", output_index=block.index, item=done)]

    def _event(self, name: str, /, **data: object) -> Event:
        event: Json = {"type": name, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return name, event

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind is Kind.CALL else {**place, "content_index": 0}

    def _item_id(self, block: Block) -> str:
        suffix = f"-{block.number}" if block.number else ""
        return _ITEM_PREFIXES[block.kind] + self._request_id + suffix

    def _items(self, status: str) -> list[Json]:
        """`status` of the last one; those before it are complete."""
        blocks = self._blocks.all
        return [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]

    def _item(self, block: Block, status: str, *, begun: bool = False) -> Json:
        """`begun`: before anything of it was said."""
        head: Json = {"id": self._item_id(block), "status": status}
        content = [] if begun else [_part(block)]
        match block.kind:
            case Kind.REASONING:
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case Kind.TEXT:
                return {**head, "type": "message", "role": "assistant", "content": content}
            case Kind.CALL:
                arguments = "" if begun else block.text
                call_id = self._call_id(block.number)
                return {
                    **head,
                    "type": "function_call",
                    "call_id": call_id,
                    "name": block.name,
                    "arguments": arguments,
                }

    def _response(self, status: str, output: list[Json]) -> Json:
        ask, params = self._ask, self._ask.params
        return {
            "id": ID_PREFIX + self._request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": ask.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": ask.metadata,
            "model": ask.model,
            "output": output,
            "parallel_tool_calls": ask.parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": ask.text,
            "tool_choice": ask.tool_choice,
            "tools": ask.tools,
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(block: Block) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _usage(report: RequestReport) -> Json:
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": report.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + report.completion_tokens,
    }
