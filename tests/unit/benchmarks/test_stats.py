"""Statistics of the serving benchmark, and its workloads."""

import json
from pathlib import Path

import pytest

from benchmarks.stats import Answer, percentile, summarize
from benchmarks.workload import load_items, random_items


def test_percentiles_interpolate_between_closest_ranks() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([5], 99) == 5
    assert percentile([], 50) == 0


def test_times_of_an_answer() -> None:
    answer = Answer(1.0, (1.5, 1.7, 2.1), 3)
    assert answer.ttft_s == 0.5
    assert answer.e2e_s == pytest.approx(1.1)
    assert answer.gaps_s() == pytest.approx([0.2, 0.4])


def test_tokens_of_one_chunk_share_its_gap_so_that_gaps_sum_to_the_decode_time() -> None:
    gaps = Answer(0.0, (1.0, 2.0, 4.0), 6).gaps_s()
    assert len(gaps) == 5
    assert sum(gaps) == pytest.approx(3.0)


def test_errors_and_slos_are_told_apart() -> None:
    fast, slow = Answer(0.0, (0.1, 0.2), 2), Answer(0.0, (0.1, 0.9), 2)
    summary = summarize([fast, slow, Answer(0.0, (), 0, "429: full"), Answer(0.0, (), 0)], 2.0, 200, 150)
    assert summary["errors"] == {"429: full": 1, "no token": 1}
    assert summary["goodput"] == 0.5
    assert summary["goodput_share"] == 0.25
    assert summary["output_throughput"] == 2.0


def test_an_answer_of_one_token_has_no_gap_and_no_tpot() -> None:
    summary = summarize([Answer(0.0, (0.3,), 1)], 1.0)
    assert summary["itl_ms"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert summary["tpot_ms"] == summary["itl_ms"]


def test_random_prompts_are_unique_and_repeatable() -> None:
    items = random_items(8, 16, 4, 40_000, 1)
    assert items == random_items(8, 16, 4, 40_000, 1)
    assert len({tuple(item.prompt) for item in items}) == 8


def test_a_mooncake_trace_keeps_its_prefix_sharing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * n, "input_length": 700, "output_length": 9, "hash_ids": [7, n]} for n in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = load_items(f"mooncake:{path}", 10, 40_000, 600, 5, 2.0)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:]
    assert (len(first.prompt), first.output_len, second.at_s) == (600, 5, 1.0)
