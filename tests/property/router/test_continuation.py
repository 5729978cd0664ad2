"""Text cut at any token joins to the uncut text; continuation tokens say what was sealed, or are refused."""

import base64
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.router.test_text import FACTORY, stream, tokens_of_any_kind, whole_text
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.router.continuation import ContinuationTokens, begin, longest
from twostroke.router.request import Continuation, GenerateRequest, ServedModel

KEY = b"a key of the tests"
NOW = 1_000_000.0
TOKENS = ContinuationTokens([KEY], ttl_s=60, unix_time=lambda: NOW)
MODEL = ServedModel("m", max_context=64, page_size=4, num_prefill_workers=1, num_decode_workers=1, fingerprint="w")
REQUEST = GenerateRequest(RequestId("r"), "m", (1, 2, 3), SamplingParams(max_tokens=20, seed=9), time_left_s=5.0)

sealed_ones = st.builds(
    Continuation,
    choice=st.integers(0, 200),
    seed=st.integers(0, (1 << 64) - 1),
    max_tokens=st.integers(1, 1 << 40),
    model=st.binary(min_size=8, max_size=8),
    binding=st.binary(min_size=16, max_size=16),
    tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=64).map(tuple) | st.lists(st.integers(0, 65535)).map(tuple),
)


def in_parts(tokens: list[int], stop: tuple[str, ...], cuts: list[int]) -> str:
    """The text of an answer that is continued at each of `cuts`, as the dispatcher tells it."""
    pieces: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        decoder = FACTORY(stop)
        decoder.skip(tokens[:start])
        for token in tokens[start:end]:
            step = decoder.push(token)
            pieces.append(step.text)
            if step.stopped:
                return "".join(pieces)
    return "".join(pieces) + decoder.finish()


@settings(deadline=None)
@given(tokens_of_any_kind, st.lists(st.text(alphabet="abcd é", min_size=1, max_size=5), max_size=3).map(tuple))
def test_text_joins_wherever_it_is_cut(tokens: list[int], stop: tuple[str, ...]) -> None:
    uncut = "".join(stream(tokens, stop)[0])
    assert in_parts(tokens, stop, list(range(1, len(tokens)))) == uncut
    for cut in range(1, len(tokens)):
        assert in_parts(tokens, stop, [cut]) == uncut


@settings(deadline=None)
@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=8), max_size=4))
def test_to_skip_is_to_push(text: str, stops: list[str]) -> None:
    """Texts and stop strings that overlap with themselves in every way."""
    stop = tuple(stops)
    told, skipping = [ord(letter) for letter in text], FACTORY(stop)
    pushing = FACTORY(stop)
    if any(pushing.push(token).stopped for token in told):
        return
    skipping.skip(told)
    for token in b"abbaababbbaaab":
        expected = pushing.push(token)
        assert skipping.push(token) == expected
        if expected.stopped:
            return
    assert skipping.finish() == pushing.finish()


@settings(deadline=None, max_examples=30)
@given(tokens_of_any_kind)
def test_every_substring_may_be_a_stop_string_across_the_cut(tokens: list[int]) -> None:
    text = whole_text(tokens)[:12]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = (text[start:end],)
            uncut = "".join(stream(tokens, stop)[0])
            assert all(in_parts(tokens, stop, [cut]) == uncut for cut in range(1, min(len(tokens), 8)))


@given(sealed_ones)
def test_what_is_opened_is_what_was_sealed(one: Continuation) -> None:
    assert TOKENS.open(TOKENS.seal(one), len(one.tokens)) == one


def refused(text: str, tokens: ContinuationTokens = TOKENS, max_context: int = 64) -> str:
    with pytest.raises(InvalidRequest) as raised:
        tokens.open(text, max_context)
    assert raised.value.field == "continuation"
    return raised.value.message


@given(sealed_ones, st.data())
def test_a_changed_one_is_refused(one: Continuation, data: st.DataObject) -> None:
    sealed = bytearray(base64.urlsafe_b64decode(TOKENS.seal(one)))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    assert "changed" in refused(base64.urlsafe_b64encode(sealed).decode())


@given(sealed_ones, st.data())
def test_a_part_of_one_and_one_with_more_are_refused(one: Continuation, data: st.DataObject) -> None:
    sealed = TOKENS.seal(one)
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert "not one of ours" in refused(sealed[:cut]) or len(sealed) > longest(64)
    for more in (sealed + sealed, sealed + data.draw(st.text(max_size=8)) + "AAAA", sealed[cut:] + sealed[:cut]):
        if more != sealed:
            refused(more, max_context=10**6)


@given(sealed_ones, sealed_ones)
def test_parts_of_two_make_none(one: Continuation, other: Continuation) -> None:
    """Head, tokens and signature of one are good for no other."""
    first, second = (base64.urlsafe_b64decode(TOKENS.seal(each)) for each in (one, other))
    for place in (54, len(first) - 16):
        mixed = first[:place] + second[place:]
        if mixed not in (first, second):
            assert "changed" in refused(base64.urlsafe_b64encode(mixed).decode(), max_context=10**6)


@given(st.text() | st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_garbage_is_refused(text: str) -> None:
    assert "not one of ours" in refused(text) or len(text) > longest(64)


def test_another_key_an_old_one_and_one_too_long_are_refused() -> None:
    sealed = TOKENS.seal(Continuation(0, 1, 2, b"m" * 8, b"b" * 16, (1,)))
    assert "changed" in refused(sealed, ContinuationTokens([b"another key"], 60, lambda: NOW))
    assert "expired" in refused(sealed, ContinuationTokens([KEY], 60, lambda: NOW + 61))
    assert str(longest(64)) in refused("A" * (longest(64) + 4))


# ----------------------------------------------------------------------------------- what it is bound to


def test_without_a_budget_a_request_is_left_alone() -> None:
    assert begin(REQUEST, MODEL, 0, None, seed=None, max_tokens=None) is REQUEST


@given(st.integers(1, 30), st.integers(1, 19))
def test_a_budget_bounds_each_part_and_max_tokens_the_whole(budget: int, num_delivered: int) -> None:
    first = begin(REQUEST, MODEL, budget, None, seed=None, max_tokens=20)
    assert first.sampling.max_tokens == min(20, budget)
    assert first.ends_by_budget == (budget < 20)
    assert first.continuation is not None
    opened = replace(first.continuation, choice=3, tokens=tuple(range(num_delivered)))
    drawn_anew = replace(REQUEST, sampling=replace(REQUEST.sampling, seed=77), num_choices=4)
    later = begin(drawn_anew, MODEL, budget, opened, seed=None, max_tokens=20)
    assert later.sampling.max_tokens == min(20, num_delivered + budget)
    assert later.sampling.seed == 9
    assert (later.first_choice, later.num_choices, later.delivered) == (3, 1, opened.tokens)
    unbound = begin(drawn_anew, MODEL, 0, opened, seed=None, max_tokens=20)
    assert unbound.sampling.max_tokens == 20
    assert not unbound.ends_by_budget


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": (1, 2, 4)},
        {"prompt": (1, 2)},
        {"stop": ("x",)},
        {"salt": "s"},
        {"tenant": "other"},
        {"adapter": "a"},
        *({name: value} for name, value in (("temperature", 0.5), ("top_k", 3), ("presence_penalty", 0.1))),
        *({name: value} for name, value in (("min_tokens", 1), ("logprobs", 0), ("logit_bias", ((1, 2.0),)))),
        {"asked_seed": 9},
        {"asked_max_tokens": 20},
    ],
    ids=str,
)
def test_a_continuation_is_of_one_request(changes: dict[str, object]) -> None:
    first = begin(REQUEST, MODEL, 5, None, seed=None, max_tokens=None)
    assert first.continuation is not None
    opened = replace(first.continuation, tokens=(7,))
    asked = {name: changes.pop(f"asked_{name}", None) for name in ("seed", "max_tokens")}
    own = {name: value for name, value in changes.items() if name in GenerateRequest.__dataclass_fields__}
    sampling = {name: value for name, value in changes.items() if name not in own}
    other = replace(REQUEST, sampling=replace(REQUEST.sampling, **sampling), **own)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="another request") as raised:
        begin(other, MODEL, 5, opened, **asked)  # type: ignore[arg-type]
    assert raised.value.field == "continuation"


@pytest.mark.parametrize("changes", [{"name": "other"}, {"fingerprint": "other"}], ids=str)
def test_a_continuation_is_of_one_model(changes: dict[str, str]) -> None:
    first = begin(REQUEST, MODEL, 5, None, seed=None, max_tokens=None)
    with pytest.raises(InvalidRequest, match="another model"):
        begin(REQUEST, replace(MODEL, **changes), 5, first.continuation, seed=None, max_tokens=None)  # type: ignore[arg-type]
