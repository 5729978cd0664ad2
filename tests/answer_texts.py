"""Texts of answers for tests: calls as models write them, words, and noise made of the pieces that parsers look for."""

import json

from hypothesis import strategies as st

from twostroke.router.tool_calls import ToolFormat

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA, ToolFormat.MISTRAL
OFFERED = ("f", "weather", "now")
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,10}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text(st.sampled_from("ab ,.\n\u00e9\U0001f600"), max_size=20).map(str.strip)
PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", '{"name": "f", "arguments": {"a": 1}}']
PIECES += ["{", "}", "[", "]", '"', "name", '"name"', ":", ",", ";", " ", "\n", "<", "\\", "f{", "hello", "\u00e9"]
PIECES += ["{}", '{"name": "f"}', '{"name": "now", "arguments": "{\\"a\\": 1}"}', '"f"', "[ARGS]", "null", "wea"]
PIECES += ['{"name": "f", "arguments": ', '{"name": "f", "arguments": "{', '{"', '"}', '\\"', "'", "\t", "\\u00"]
PIECES += ["</tool_", "<tool"]
NOISE = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def written(format: ToolFormat, calls: list[tuple[str, object]]) -> str:
    field = "parameters" if format is LLAMA else "arguments"
    bodies = [json.dumps({"name": name, field: arguments}, ensure_ascii=False) for name, arguments in calls]
    match format:
        case ToolFormat.HERMES:
            return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        case ToolFormat.LLAMA:
            return "; ".join(bodies)
        case ToolFormat.MISTRAL:
            return f"[TOOL_CALLS] [{', '.join(bodies)}]"


def cut(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted({at % (len(text) + 1) for at in cuts}), len(text)]
    return [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]
