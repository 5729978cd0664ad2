"""Tool calls and reasoning: however an answer is cut, its parts are the same; and what each form says is found."""

import json
import time
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.answer_texts import CALLS, HERMES, LLAMA, MISTRAL, NOISE, OFFERED, WORDS, cut, written
from twostroke.router.answer_parts import Call, CallArguments, CallBegin, Content, Parsed, Part, gather
from twostroke.router.tool_calls import ChatStyle, ToolFormat, make_parser, style_of


def parse(
    format: ToolFormat,
    pieces: list[str],
    names: Collection[str] = OFFERED,
    *,
    reasoning: bool = False,
    opened: bool = False,
) -> Parsed:
    parser = make_parser(ChatStyle(format), names, reasoning=reasoning, opened=opened)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return gather([*parts, *parser.finish()])


@pytest.mark.parametrize("format", ToolFormat)
@given(calls=CALLS, before=WORDS, thought=WORDS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_calls_are_found_however_the_text_is_cut(
    format: ToolFormat, calls: list[tuple[str, object]], before: str, thought: str, cuts: list[int]
) -> None:
    if format is LLAMA:
        before = ""
    text = f"<think>\n{thought}\n</think>\n\n{before}\n{written(format, calls)}"
    parsed = parse(format, cut(text, cuts), {name for name, _ in calls}, reasoning=True)
    assert parsed.reasoning == thought
    assert parsed.content == before
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@pytest.mark.parametrize("format", ToolFormat)
@given(text=NOISE, cuts=st.lists(st.integers(0, 200), max_size=20), opened=st.booleans())
def test_any_text_gives_the_same_parts_however_it_is_cut(
    format: ToolFormat, text: str, cuts: list[int], opened: bool
) -> None:
    whole = parse(format, [text], reasoning=True, opened=opened)
    assert parse(format, cut(text, cuts), reasoning=True, opened=opened) == whole
    assert parse(format, list(text), reasoning=True, opened=opened) == whole
    assert all(call.name in OFFERED for call in whole.calls)


@pytest.mark.parametrize("format", ToolFormat)
@given(text=st.text(st.sampled_from("ab <t{}\n\"'[1,:"), max_size=40))
def test_text_without_a_call_is_text(format: ToolFormat, text: str) -> None:
    assert parse(format, list(text)) == Parsed(text, "", ())


CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
FOUND = Call("f", '{"a": [1, "}"]}')
NONE = Call("now", "{}")
EXAMPLES = [
    (HERMES, CALL, Parsed("", "", (FOUND,))),
    (HERMES, "Well.\n" + CALL + "\n", Parsed("Well.", "", (FOUND,))),
    (HERMES, CALL + "\n" + CALL + " Done.", Parsed("Done.", "", (FOUND, FOUND))),
    # As small models write: members in another order, arguments as a string, as null, or not at all.
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"}</tool_call>', [Call("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', [NONE]),
    (HERMES, '<tool_call>{"name": "now", "arguments": ""}</tool_call>', [NONE]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', [NONE]),
    # A brace or a mark missing, a brace too many: what is certain is told, and the next call is found.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>' + CALL, [Call("f", '{"a": 1}'), FOUND]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>' + CALL, [Call("f", '{"a": 1'), FOUND]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>\n' + CALL, [NONE, FOUND]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}\n' + CALL, [NONE, FOUND]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', [Call("f", '{"a": ')]),
    (HERMES, CALL[:-3], [FOUND]),
    (HERMES, CALL + " a </tool_call>", Parsed("a </tool_call>", "", (FOUND,))),
    (HERMES, CALL.removesuffix("</tool_call>") + " a </tool_call> b", Parsed("a  b", "", (FOUND,))),
    # Two before one closing mark.
    (HERMES, '<tool_call>{"name": "now"}\n{"name": "now"}, {"name": "now"}]</tool_call>', [NONE, NONE, NONE]),
    (HERMES, '<tool_call>{"name": "now"}, {"b": 1}</tool_call>', Parsed('{"b": 1}', "", (NONE,))),
    # What may not stand in a JSON string.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b\n\t\x01c"}}', [Call("f", r'{"a": "b\n\t\u0001c"}')]),
    (
        HERMES,
        r"""<tool_call>{"name": "f", "arguments": {"a": "\' \d \" \\"}}""",
        [Call("f", r"""{"a": "\\' \\d \" \\"}""")],
    ),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": \"b\nc\"}"}', [Call("f", r'{"a": "b\nc"}')]),
    (HERMES, r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}', [Call("f", '{"a": "?"}')]),
    # No call: not finished, not JSON, not offered, or with arguments that are no object.
    (HERMES, '<tool_call>{"na', None),
    (HERMES, "<tool_call>no</tool_call>", None),
    (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": ["a"]}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": "[\\"a\\"]"}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": "}</tool_call>', None),
    (HERMES, """<tool_call>{"name": "f", "arguments": {'a': 1}}</tool_call>""", None),
    (HERMES, '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "f", "arguments": { ', None),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
    (HERMES, "a < b <tool_cal", None),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [Call("f", '{"a": 1}')]),
    (LLAMA, '\n{"type": "function", "name": "now", "parameters": {}}; {"name": "now"}\n', [NONE, NONE]),
    (LLAMA, '{"name": "Ann", "age": 3}', None),
    (LLAMA, '{"temperature": 3}', None),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', None),
    (MISTRAL, 'ok [TOOL_CALLS]f{"a": 1}', Parsed("ok", "", (Call("f", '{"a": 1}'),))),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', [Call("f", '{"a": 1}'), NONE]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "x"}, {"name": "now"}]\n', [NONE, NONE]),
    (MISTRAL, "[TOOL_CALLS]", None),
    (MISTRAL, "[TOOL_CALLS]g{}", None),
    (MISTRAL, "[TOOL_CALLS] nothing", None),
    (MISTRAL, "[TOOL_CALLS] [1]", None),
    (MISTRAL, "[TOOL_CALLS]f" + " " * 300 + "{}", None),
    (MISTRAL, "[TOOL_CALLS]" + " " * 300 + "f{}", None),
    (MISTRAL, "[TOOL_CALLS][" + " " * 300 + '{"name": "now"}]', None),
    (MISTRAL, '[TOOL_CALLS] [{"name": "g", "arguments": {}}]', None),
]


@pytest.mark.parametrize(("format", "text", "wanted"), EXAMPLES)
def test_examples_whole_and_cut_everywhere(format: ToolFormat, text: str, wanted: Parsed | list[Call] | None) -> None:
    """A list: the calls, and no text. None: it is all text."""
    match wanted:
        case None:
            expected = Parsed(text, "", ())
        case Parsed():
            expected = wanted
        case _:
            expected = Parsed("", "", tuple(wanted))
    assert parse(format, [text]) == expected
    assert parse(format, list(text)) == expected
    for at in range(len(text)):
        assert parse(format, [text[:at], text[at:]]) == expected, at


@given(calls=CALLS, cuts=st.lists(st.integers(0, 500), max_size=20))
def test_line_breaks_that_a_model_did_not_escape(calls: list[tuple[str, object]], cuts: list[int]) -> None:
    text = written(HERMES, calls).replace(r"\\", "").replace(r"\n", "\n").replace(r"\t", "\t")
    parsed = parse(HERMES, cut(text, cuts), {name for name, _ in calls})
    assert len(parsed.calls) == len(calls)
    for call in parsed.calls:
        json.loads(call.arguments)


@pytest.mark.parametrize("name", ["name", "arguments", "other"])
def test_values_as_deep_as_a_model_likes(name: str) -> None:
    first = '"id": 1, ' if name == "other" else ""
    text = f'<tool_call>{{{first}"{name}": {"[" * 3000}{"]" * 3000}, "name": "now", "arguments": {{}}}}</tool_call>'
    assert parse(HERMES, [text]) == (Parsed("", "", (NONE,)) if name == "other" else Parsed(text, "", ()))


@pytest.mark.parametrize("before", ["", "a", "<think>", "<think>a", "[TOOL_CALLS]", "[TOOL_CALLS][", CALL])
@pytest.mark.parametrize("format", ToolFormat)
def test_white_space_without_end_costs_what_text_costs(format: ToolFormat, before: str) -> None:
    started = time.process_time()
    parse(format, [before, *["    "] * 30_000], reasoning=True)
    assert time.process_time() - started < 1


def test_a_call_is_told_as_it_is_written() -> None:
    parser = make_parser(ChatStyle(), OFFERED)
    pieces = ('<tool_call>{"name": "f", "argu', 'ments": ', '{"a": "b', 'c"}}')
    assert [parser.push(piece) for piece in pieces] == [
        [],
        [],
        [CallBegin(0, "f"), CallArguments(0, '{"a": "b')],
        [CallArguments(0, 'c"}')],
    ]


def test_other_json_is_told_as_it_is_written() -> None:
    parser = make_parser(ChatStyle(LLAMA), OFFERED)
    pieces = ('{"te', 'mp": ', '{"name": "f", "par', 'ameters": {}}}')
    assert [parser.push(piece) for piece in pieces] == [
        [],
        [Content('{"temp":')],
        [Content(' {"name": "f", "par')],
        [Content('ameters": {}}}')],
    ]


def test_no_more_calls_than_wanted() -> None:
    parser = make_parser(ChatStyle(), OFFERED, max_calls=1)
    parsed = gather([*parser.push(CALL + "\n" + CALL), *parser.finish()])
    assert parsed == Parsed("", "", (FOUND,))


def test_without_names_nothing_is_a_call() -> None:
    assert parse(HERMES, list(CALL), ()) == Parsed(CALL, "", ())


def test_reasoning_that_the_prompt_opened_or_that_never_ends() -> None:
    for pieces, opened, wanted in [
        (["\nhm", "m</thi", "nk>\n\nyes"], True, Parsed("yes", "hmm", ())),
        (["hm <", " "], True, Parsed("", "hm <", ())),
        (["  <think> a"], False, Parsed("", "a", ())),
        (["  <thin a"], False, Parsed("  <thin a", "", ())),
        (["<think></think>a <think>"], False, Parsed("a <think>", "", ())),
        ([" "], False, Parsed(" ", "", ())),
    ]:
        assert parse(HERMES, pieces, reasoning=True, opened=opened) == wanted
        assert parse(HERMES, list("".join(pieces)), reasoning=True, opened=opened) == wanted


def test_styles_are_read_from_templates() -> None:
    assert style_of("... <tool_call> ... <think> </think>") == ChatStyle(HERMES, marks_reasoning=True)
    assert style_of("[TOOL_CALLS]").tool_format is MISTRAL
    assert style_of('"parameters": ').tool_format is LLAMA
    assert style_of("") == ChatStyle()
