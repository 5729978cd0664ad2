"""What to send: unique random prompts, or a data set. Prompts are token ids, so every server computes the same."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

FIRST_ID = 1000
"""Ids below are special tokens in common vocabularies."""
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Item:
    prompt: list[int] | str
    output_len: int
    at_s: float | None = None
    """When to send it, seconds from the start; None: as the loop allows."""


def random_items(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Item]:
    random = Random(seed)
    return [Item([random.randrange(FIRST_ID, vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def load_items(
    dataset: str, count: int, vocab_size: int, max_input: int, max_output: int, time_scale: float
) -> list[Item]:
    """`mooncake:PATH` (JSON lines with hash_ids, one for each 512-token block) or `sharegpt:PATH`.

    Raises ValueError for another kind.
    """
    kind, _, path = dataset.partition(":")
    if kind == "mooncake":
        return list(islice(_mooncake(Path(path), vocab_size, max_input, max_output, time_scale), count))
    if kind == "sharegpt":
        return list(islice(_sharegpt(Path(path), max_input, max_output), count))
    raise ValueError(f"dataset {dataset!r}: use mooncake:PATH or sharegpt:PATH")


def _mooncake(path: Path, vocab_size: int, max_input: int, max_output: int, time_scale: float) -> Iterator[Item]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            length = min(row["input_length"], max_input)
            prompt: list[int] = []
            for block in row["hash_ids"]:
                if len(prompt) >= length:
                    break
                random = Random(block)  # equal ids, equal tokens: the trace's prefix sharing
                prompt += [random.randrange(FIRST_ID, vocab_size) for _ in range(MOONCAKE_BLOCK)]
            yield Item(prompt[:length], min(row["output_length"], max_output), row["timestamp"] / 1000 * time_scale)


def _sharegpt(path: Path, max_input: int, max_output: int) -> Iterator[Item]:
    for row in json.loads(path.read_text()):
        turns = row.get("conversations", [])
        if len(turns) >= 2 and turns[0].get("from") in ("human", "user") and turns[0].get("value"):
            # About four characters a token; the answer's length stands for its tokens likewise.
            text, answer = turns[0]["value"][: 4 * max_input], turns[1].get("value", "")
            yield Item(text, max(1, min(len(answer) // 4, max_output)))
