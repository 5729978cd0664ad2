"""The requests of a load run: random prompts, a Mooncake trace, or ShareGPT conversations. They follow from the seed.

A Mooncake line names its prompt by one id for each 512-token block. A block's tokens follow from its id and the seed
alone, so equal ids become equal tokens and the trace's prefix sharing is reproduced without any text.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

FIRST_ID = 1000
"""Special tokens mostly have lower ids (or lie past `vocab_size`)."""
BLOCK_TOKENS = 512

TokenIds = list[int]
Encode = Callable[[str], TokenIds]


@dataclass(frozen=True, slots=True)
class Ask:
    """`due_s` is the time from the run's start; None: as soon as the closed loop has room."""

    prompt: TokenIds | str
    max_tokens: int
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """Longest input and output in tokens; None does not clip."""

    max_input: int | None = None
    max_output: int | None = None

    def output(self, num_tokens: int) -> int:
        return max(1, num_tokens if self.max_output is None else min(num_tokens, self.max_output))


def random_ids(key: str, num_tokens: int, vocab_size: int) -> TokenIds:
    """A string seed is hashed whole, so neighbouring keys share no prefix."""
    return random.Random(key).choices(range(FIRST_ID, vocab_size), k=num_tokens)


def synthetic(seed: str, num_requests: int, input_len: int, output_len: int, vocab_size: int) -> list[Ask]:
    return [Ask(random_ids(f"{seed}/{n}", input_len, vocab_size), output_len) for n in range(num_requests)]


def mooncake(
    path: Path, seed: str, num_requests: int, vocab_size: int, clip: Clip, time_scale: float | None
) -> list[Ask]:
    """The trace's first requests; raises ValueError for a line that is not one. Times are multiplied by `time_scale`;
    None forgets them. Clipping keeps a prompt's head, so shared prefixes stay shared."""
    asks = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, num_requests), 1):
            try:
                entry = json.loads(line)
                length, blocks = int(entry["input_length"]), entry["hash_ids"]
                num_output, at_ms = int(entry["output_length"]), float(entry["timestamp"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a request of a Mooncake trace: {error!r}") from error
            if not 0 < length <= len(blocks) * BLOCK_TOKENS:
                raise ValueError(f"{path}:{number}: {length} tokens in {len(blocks)} blocks of {BLOCK_TOKENS}")
            length = length if clip.max_input is None else min(length, clip.max_input)
            prompt: TokenIds = []
            for block in blocks[: -(-length // BLOCK_TOKENS)]:
                prompt += random_ids(f"{seed}/block/{block}", BLOCK_TOKENS, vocab_size)
            due_s = None if time_scale is None else at_ms / 1e3 * time_scale
            asks.append(Ask(prompt[:length], clip.output(num_output), due_s))
    return asks


def sharegpt(path: Path, seed: str, num_requests: int, output_len: int, clip: Clip, encode: Encode | None) -> list[Ask]:
    """First human turns, drawn by the seed. With `encode` an answer is as long as the conversation's own, and a long
    prompt is cut (and then sent as ids); without it, each answer has `output_len` tokens."""
    if clip.max_input is not None and encode is None:
        raise ValueError("clipping text to a number of tokens needs a tokenizer")
    turns = list(_first_turns(json.loads(path.read_text(encoding="utf-8"))))
    random.Random(f"{seed}/sharegpt").shuffle(turns)
    asks = []
    for question, reply in turns[:num_requests]:
        prompt: TokenIds | str = question
        num_output = output_len
        if encode is not None:
            num_output = len(encode(reply)) or output_len
            if clip.max_input is not None and len(ids := encode(question)) > clip.max_input:
                prompt = ids[: clip.max_input]
        asks.append(Ask(prompt, clip.output(num_output)))
    return asks


def _first_turns(conversations: list[dict[str, list[dict[str, str]]]]) -> Iterator[tuple[str, str]]:
    for entry in conversations:
        turns = entry.get("conversations", [])
        for number, turn in enumerate(turns):
            if turn.get("from") in ("human", "user") and turn.get("value"):
                yield turn["value"], turns[number + 1].get("value", "") if number + 1 < len(turns) else ""
                break


def with_poisson_arrivals(asks: list[Ask], seed: str, rate: float) -> list[Ask]:
    """`rate` in requests a second; the first is due at once."""
    draw, due_s, timed = random.Random(f"{seed}/arrivals"), 0.0, []
    for ask in asks:
        timed.append(Ask(ask.prompt, ask.max_tokens, due_s))
        due_s += draw.expovariate(rate)
    return timed
