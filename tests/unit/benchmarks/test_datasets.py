"""Prompts follow from the seed; a trace keeps its prefix sharing."""

import json
from pathlib import Path

import pytest

from benchmarks.datasets import FIRST_ID, Ask, Clip, mooncake, sharegpt, synthetic, with_poisson_arrivals

VOCAB = 40000


def trace(tmp_path: Path, *entries: dict[str, object]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def entry(at_ms: int, length: int, blocks: list[int], output: int = 5) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": blocks}


def test_random_prompts_repeat_with_the_seed_and_differ_within_it() -> None:
    asks = synthetic("0", 4, 16, 8, VOCAB)
    assert asks == synthetic("0", 4, 16, 8, VOCAB)
    assert len({tuple(ask.prompt) for ask in [*asks, *synthetic("1", 4, 16, 8, VOCAB)]}) == 8
    assert all(FIRST_ID <= token < VOCAB for ask in asks for token in ask.prompt if isinstance(token, int))


def test_equal_blocks_of_a_trace_are_equal_tokens(tmp_path: Path) -> None:
    path = trace(tmp_path, entry(0, 1000, [3, 4]), entry(500, 700, [3, 9]))
    first, second = mooncake(path, "0", 10, VOCAB, Clip(), 2.0)
    assert (len(first.prompt), len(second.prompt)) == (1000, 700)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    assert (first.due_s, second.due_s) == (0.0, 1.0)


def test_a_clipped_trace_keeps_heads_and_can_forget_its_times(tmp_path: Path) -> None:
    path = trace(tmp_path, entry(0, 1000, [3, 4], output=90))
    (whole,) = mooncake(path, "0", 1, VOCAB, Clip(), None)
    (cut,) = mooncake(path, "0", 1, VOCAB, Clip(600, 10), None)
    assert cut == Ask(whole.prompt[:600], 10, None)


@pytest.mark.parametrize("bad", [{"timestamp": 0}, entry(0, 513, [1]), entry(0, 0, [1])])
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="trace.jsonl:2"):
        mooncake(trace(tmp_path, entry(0, 1, [1]), bad), "0", 10, VOCAB, Clip(), None)


def test_sharegpt_takes_first_human_turns(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "abcdef"}, {"from": "gpt", "value": "xyz"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": []}, {}]))

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    assert sharegpt(path, "0", 9, 64, Clip(), None) == [Ask("abcdef", 64)]
    assert sharegpt(path, "0", 9, 64, Clip(), encode) == [Ask("abcdef", 3)]
    assert sharegpt(path, "0", 9, 64, Clip(2, 1), encode) == [Ask(encode("ab"), 1)]
    with pytest.raises(ValueError, match="tokenizer"):
        sharegpt(path, "0", 9, 64, Clip(2), None)


def test_poisson_arrivals_have_the_rate() -> None:
    asks = with_poisson_arrivals([Ask([1], 1)] * 4000, "0", 10.0)
    due = [ask.due_s for ask in asks if ask.due_s is not None]
    assert due[0] == 0.0
    assert due == sorted(due)
    assert due[-1] == pytest.approx(400, rel=0.1)
