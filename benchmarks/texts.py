"""Prompts for `benchmarks.gateway` that differ from their first words on."""

import random
from collections.abc import Iterator

# fmt: off
WORDS = (
    "time", "people", "way", "water", "day", "man", "world", "life", "hand", "part", "child", "eye", "woman", "place",
)
# fmt: on
NUM_TEXTS = 1000


def texts(num_tokens: int, *, words: bool) -> Iterator[str]:
    """`NUM_TEXTS` of `num_tokens` tokens: of words for a model's tokenizer, of letters where a token is a byte."""
    draw = random.Random(num_tokens)
    for _ in range(NUM_TEXTS):
        yield " ".join(draw.choices(WORDS, k=num_tokens)) if words else "".join(draw.choices("abcd ", k=num_tokens))
