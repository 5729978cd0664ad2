"""The load benchmark's arithmetic, on values worked out by hand."""

import pytest

from benchmarks.stats import Answer, Slo, inter_token_latencies, percentile, spread_ms, summarize


def answer(*arrivals_s: float, started_s: float = 0.0, tokens: int | None = None, error: str | None = None) -> Answer:
    total = len(arrivals_s) if tokens is None else tokens
    ended_s = arrivals_s[-1] if arrivals_s else started_s
    return Answer(started_s, ended_s, total, arrivals_s, total, error=error)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0, 50.0], 50) == 30.0
    assert percentile([10.0, 20.0], 90) == pytest.approx(19.0)
    assert percentile([7.0], 99) == 7.0


def test_no_samples_have_no_figures() -> None:
    spread = spread_ms([])
    assert (spread.samples, spread.mean, spread.p50, spread.p99) == (0, None, None, None)


def test_one_chunk_a_token_gives_the_gaps() -> None:
    assert inter_token_latencies([1.0, 1.5, 3.0], 3) == [0.5, 1.5]


@pytest.mark.parametrize(("num_chunks", "num_tokens"), [(3, 7), (4, 6), (7, 3), (2, 9), (9, 2)])
def test_tokens_spread_over_chunks_keep_number_and_sum(num_chunks: int, num_tokens: int) -> None:
    arrivals = [float(n * n) for n in range(num_chunks)]
    latencies = inter_token_latencies(arrivals, num_tokens)
    assert len(latencies) == num_tokens - 1
    assert sum(latencies) == pytest.approx(arrivals[-1] - arrivals[0])


def test_one_token_has_neither_itl_nor_tpot() -> None:
    summary = summarize([answer(0.25)], Slo())
    assert summary.ttft_ms.p50 == summary.e2e_ms.p50 == 250.0
    assert summary.itl_ms.samples == summary.tpot_ms.samples == 0


def test_several_tokens_in_a_single_chunk_have_no_tpot() -> None:
    assert answer(0.25, tokens=5).tpot_s is None
    assert inter_token_latencies([0.25], 5) == []


def test_nothing_asked_gives_an_empty_summary() -> None:
    summary = summarize([], Slo())
    assert (summary.requests, summary.duration_s, summary.request_rate, summary.good_share) == (0, 0.0, 0.0, None)


def test_rates_latencies_and_failures() -> None:
    failed = Answer(0.0, 4.0, 3, error="http 500")
    summary = summarize([answer(1.0, 1.5, 2.0), answer(1.5, 2.5, 3.5, started_s=1.0), failed], Slo())
    assert summary.duration_s == 4.0
    assert (summary.request_rate, summary.output_token_rate) == (0.5, 1.5)
    assert (summary.failed, summary.errors) == (1, {"http 500": 1})
    assert summary.ttft_ms.mean == 750.0
    assert summary.tpot_ms.mean == summary.itl_ms.mean == 750.0
    assert summary.e2e_ms.mean == 2250.0


def test_goodput_needs_both_limits_and_counts_failures_as_bad() -> None:
    answers = [
        answer(0.1, 0.2, 0.3),  # good
        answer(0.3, 0.4, 0.5),  # late first token
        answer(0.1, 0.9, 1.7),  # slow afterwards
        Answer(0.0, 2.0, 3, error="timeout"),
    ]
    summary = summarize(answers, Slo(ttft_ms=200, itl_ms=150))
    assert (summary.good_share, summary.good_rate) == (0.25, 0.5)
    assert summarize(answers, Slo()).good_share == 0.75


def test_a_length_that_was_not_asked_for_is_counted() -> None:
    assert summarize([Answer(0.0, 1.0, 8, (0.5, 1.0), 2)], Slo()).short_answers == 1
