"""Signs of several bytes cut into tokens at every two bytes, with every short stop string: exactly what is certain."""

from itertools import combinations

import pytest

from tests.text_oracle import certain, first_stop, text_of
from twostroke.router.text import TokenTextDecoder

SIGNS = "aé😀日🇩🇪."
DATA = SIGNS.encode()
STOPS = sorted({SIGNS[start : start + length] for start in range(len(SIGNS)) for length in (1, 2, 3)})


@pytest.mark.parametrize("stop", ["", *STOPS])
def test_no_split_leaks_delays_or_breaks_a_character(stop: str) -> None:
    stops = (stop,) if stop else ()
    for first, second in combinations(range(len(DATA) + 1), 2):
        pieces = [DATA[:first], DATA[first:second], DATA[second:]]
        decoder = TokenTextDecoder(pieces, stops)
        told = ""
        for token in range(len(pieces)):
            text = text_of(pieces[: token + 1], final=False)
            step = decoder.push(token)
            told += step.text
            cut = first_stop(text, stops)
            assert step.stopped == (cut is not None)
            assert told == (certain(text, stops) if cut is None else text[:cut])
            assert "\ufffd" not in told
            if step.stopped:
                break
        else:
            assert told + decoder.finish() == SIGNS


@pytest.mark.parametrize("stop", ["", *STOPS])
def test_an_answer_that_ends_within_a_sign(stop: str) -> None:
    stops = (stop,) if stop else ()
    for first, end in combinations(range(len(DATA) + 1), 2):
        pieces = [DATA[:first], DATA[first:end]]
        decoder = TokenTextDecoder(pieces, stops)
        steps = [decoder.push(token) for token in range(2)]
        told = "".join(step.text for step in steps) + decoder.finish()
        text = text_of(pieces, final=True)
        cut = first_stop(text, stops)
        assert told == (text if cut is None else text[:cut])
