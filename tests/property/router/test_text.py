"""Streamed text equals whole text, and nothing of a stop string ever leaves (FIELD-REPORTS E6-E9)."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.router.text import TokenTextDecoderFactory

TABLE = [bytes([value]) for value in range(256)] + [b"ab", b"abc", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"", b"a b"]
FACTORY = TokenTextDecoderFactory(TABLE)
tokens_of_any_kind = st.lists(st.sampled_from([*range(97, 101), *range(256, len(TABLE)), 0x80, 0xC3, 0xE2, 0xFF]))


def whole_text(tokens: list[int]) -> str:
    return b"".join(TABLE[token] for token in tokens).decode("utf-8", "replace")


def stream(tokens: list[int], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    decoder = FACTORY(stop)
    pieces: list[str] = []
    for token in tokens:
        step = decoder.push(token)
        pieces.append(step.text)
        if step.stopped:
            return pieces, True
    return [*pieces, decoder.finish()], False


@given(tokens_of_any_kind)
def test_without_stop_strings_the_pieces_join_to_the_whole(tokens: list[int]) -> None:
    assert "".join(stream(tokens, ())[0]) == whole_text(tokens)


@given(tokens_of_any_kind)
def test_every_substring_as_stop_string_cuts_where_find_says(tokens: list[int]) -> None:
    text = whole_text(tokens)[:24]
    for start in range(len(text)):
        for end in range(start + 1, min(len(text), start + 12) + 1):
            stop = text[start:end]
            full = whole_text(tokens)
            assert "".join(stream(tokens, (stop,))[0]) == full[: full.find(stop)]


@given(tokens_of_any_kind, st.lists(st.text(alphabet="abcd é", min_size=1, max_size=5), max_size=4))
def test_of_several_stop_strings_the_first_completed_wins_then_the_longest(tokens: list[int], stops: list[str]) -> None:
    text = whole_text(tokens)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    pieces, stopped = stream(tokens, tuple(stops))
    assert "".join(pieces) == expected
    assert stopped == bool(ends)


@given(tokens_of_any_kind, st.text(alphabet="abcd", min_size=1, max_size=6))
def test_only_a_possible_beginning_of_the_stop_string_is_held_back(tokens: list[int], stop: str) -> None:
    decoder = FACTORY((stop,))
    given_out = ""
    for index, token in enumerate(tokens):
        step = decoder.push(token)
        given_out += step.text
        if step.stopped:
            return
        so_far = b"".join(TABLE[t] for t in tokens[: index + 1]).decode("utf-8", "replace")
        held = so_far[len(given_out) :].rstrip("\ufffd")
        assert stop.startswith(held)
