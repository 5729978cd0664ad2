"""However an answer is cut, each API tells the same in its stream as whole; and every stream is in its API's order."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.answer_texts import NOISE, OFFERED, cut
from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.apart import Apart
from twostroke.router.gateway.anthropic import MessagesTelling
from twostroke.router.gateway.parsed_form import ParsedChatForm
from twostroke.router.gateway.responses import ResponsesTelling
from twostroke.router.gateway.responses_schema import parse_responses
from twostroke.router.gateway.typed_answer import Event, Telling
from twostroke.router.request import ChoiceEnd, RequestReport
from twostroke.router.tool_calls import ChatStyle, ToolFormat, make_parser

CUTS = st.lists(st.integers(0, 200), max_size=20)
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
_PHASES = ("duration", "ttft", "itl", "queue", "route", "reserve", "prefill", "transfer", "decode")
REPORT = RequestReport(7, 9, 0, **{f"{phase}_ms": 0.0 for phase in _PHASES})
ASK = parse_responses({"model": "fake", "input": "Hi"}, LimitsSection())


def call_id(number: int) -> str:
    return f"call_{number}"


def told(
    telling: Telling, format: ToolFormat, pieces: Iterable[str], finish: FinishReason
) -> tuple[list[Event], dict[str, Any]]:
    """The events and the whole answer, as `TypedAnswer` has them told."""
    parser = make_parser(ChatStyle(format), OFFERED, reasoning=True)
    events = [*telling.begin()]
    for piece in pieces:
        events += [event for part in parser.push(piece) for event in telling.more(part, ())]
    events += [event for part in parser.finish() for event in telling.more(part, ())]
    events += telling.end((), ChoiceEnd(0, finish, 9, "", None), REPORT)
    assert all(name == data["type"] for name, data in events)
    return events, telling.whole()


@pytest.mark.parametrize("format", ToolFormat)
@given(text=NOISE, cuts=CUTS, finish=FINISHES)
def test_a_chat(format: ToolFormat, text: str, cuts: list[int], finish: FinishReason) -> None:
    def parsed_form() -> ParsedChatForm:
        make = partial(make_parser, ChatStyle(format), OFFERED, reasoning=True)
        return ParsedChatForm(Apart("id", format, make, named=False))

    form = parsed_form()
    whole: Any = parsed_form().whole_choice(0, text, finish, None)
    message: dict[str, Any] = {"role": "", "content": "", "refusal": None}
    chunks: list[Any] = [
        form.chunk_choice(0, piece, None, None, is_first=number == 0) for number, piece in enumerate(cut(text, cuts))
    ]
    chunks.append(form.chunk_choice(0, "", finish, None, is_first=False))
    for chunk in filter(None, chunks):
        delta = chunk["delta"]
        assert delta or chunk["finish_reason"]
        for name in ("role", "content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                # Only the last is added to, and by its arguments alone.
                assert call == {"index": len(calls) - 1, "function": {"arguments": call["function"]["arguments"]}}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    assert message == whole["message"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("format", ToolFormat)
@given(text=NOISE, cuts=CUTS, finish=FINISHES)
def test_a_response(format: ToolFormat, text: str, cuts: list[int], finish: FinishReason) -> None:
    def telling() -> ResponsesTelling:
        return ResponsesTelling(ASK, "id", 0, call_id, include_report=False)

    events, whole = told(telling(), format, cut(text, cuts), finish)
    assert whole == told(telling(), format, [text], finish)[1]
    (_, created), (_, started), *inner, (last, ended) = events
    assert (created["response"], ended["response"]) == (started["response"], whole)
    assert last == ("response.incomplete" if finish is FinishReason.LENGTH else "response.completed")
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    items: list[Any] = []
    pieces: list[str] = []
    is_open = False
    for name, data in inner:
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert (is_open, data["output_index"]) == (False, len(items))
            items.append(data["item"])
            pieces, is_open = [], True
            continue
        assert is_open
        assert data["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert data["item"]["id"] == items[-1]["id"]
            items[-1], is_open = data["item"], False
            continue
        assert data["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            assert data["delta"]
            pieces.append(data["delta"])
        elif kind == "function_call_arguments.done":
            assert (data["arguments"], data["name"]) == ("".join(pieces), items[-1]["name"])
        elif kind.endswith("text.done"):
            assert data["text"] == "".join(pieces)
        elif kind == "content_part.done":
            assert data["part"]["text"] == "".join(pieces)
    assert not is_open
    assert items == whole["output"]


@pytest.mark.parametrize("format", ToolFormat)
@given(text=NOISE, cuts=CUTS, finish=FINISHES)
def test_a_message(format: ToolFormat, text: str, cuts: list[int], finish: FinishReason) -> None:
    def telling() -> MessagesTelling:
        return MessagesTelling("id", "fake", 7, call_id, include_report=False)

    events, whole = told(telling(), format, cut(text, cuts), finish)
    (_, started), ping, *inner, (_, delta), stop = events
    assert (ping[0], stop[0]) == ("ping", "message_stop")
    assert {**started["message"], **delta["delta"], "usage": delta["usage"], "content": whole["content"]} == whole
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    blocks: list[Any] = []
    is_open = False
    for name, data in inner:
        if name == "content_block_start":
            assert (is_open, data["index"]) == (False, len(blocks))
            blocks.append({**data["content_block"], "pieces": ""})
            is_open = True
            continue
        assert (is_open, data["index"]) == (True, len(blocks) - 1)
        if name == "content_block_stop":
            is_open = False
        else:
            assert name == "content_block_delta"
            blocks[-1]["pieces"] += data["delta"][fields[data["delta"]["type"]]]
    assert not is_open
    assert len(blocks) == len(whole["content"])
    for block, shown in zip(blocks, whole["content"], strict=True):
        pieces = block.pop("pieces")
        if block["type"] == "tool_use":
            assert {**shown, "input": {}} == block
            assert pieces.startswith("{")
        else:
            assert {**block, block["type"]: pieces} == shown
