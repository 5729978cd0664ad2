"""What a load run measured, as plain numbers. Pure: no clock, no I/O. Seconds in, milliseconds out.

    TTFT   from the request's start to its first chunk
    ITL    the gap before each later token. A chunk may carry several tokens, and only their total (`usage`) is known:
           the tokens after the first are dealt evenly over the gaps, so that a request's ITLs add up to E2E - TTFT
    TPOT   (E2E - TTFT) / (tokens - 1), one figure a request
    E2E    from the request's start to its last chunk

In an open loop a request starts when it was due, not when the client got around to it: a client that is late shows as
latency. An answer of one token has neither ITL nor TPOT; nor has one of several tokens in a single chunk.
Failed requests count in no latency, and count as bad in goodput.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome. `arrivals_s` holds the time of each chunk with tokens, on the clock of `started_s`."""

    started_s: float
    ended_s: float
    max_tokens: int
    arrivals_s: tuple[float, ...] = ()
    num_tokens: int = 0
    has_usage: bool = True
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def e2e_s(self) -> float:
        return self.arrivals_s[-1] - self.started_s

    @property
    def tpot_s(self) -> float | None:
        if self.num_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None does not limit. The ITL limit holds for a request's mean."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met_by(self, answer: Answer) -> bool:
        if answer.error is not None:
            return False
        mean_itl_s = answer.tpot_s or 0.0
        return (self.ttft_ms is None or answer.ttft_s * 1e3 <= self.ttft_ms) and (
            self.itl_ms is None or mean_itl_s * 1e3 <= self.itl_ms
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds; every figure is None when there was no sample."""

    samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    request_rate: float
    output_token_rate: float
    output_tokens: int
    chunks: int
    short_answers: int
    """Answers with fewer or more tokens than asked for."""
    without_usage: int
    """Answers that told no token total: their chunks were counted as tokens."""
    good_share: float | None
    good_rate: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between neighbours. `ordered` is sorted and not empty."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread_ms(samples_s: Sequence[float]) -> Spread:
    if not samples_s:
        return Spread(0, None, None, None, None)
    ordered = sorted(sample * 1e3 for sample in samples_s)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p90, p99)


def inter_token_latencies(arrivals_s: Sequence[float], num_tokens: int) -> list[float]:
    """`num_tokens - 1` gaps in seconds that add up to the time from first to last chunk; empty if unknown."""
    num_gaps, num_later = len(arrivals_s) - 1, num_tokens - 1
    if num_gaps < 1 or num_later < 1:
        return []
    latencies: list[float] = []
    waited_s = 0.0
    for gap in range(num_gaps):
        waited_s += arrivals_s[gap + 1] - arrivals_s[gap]
        share = (gap + 1) * num_later // num_gaps - gap * num_later // num_gaps
        if share:  # More chunks than tokens: this gap belongs to the next token.
            latencies += [waited_s / share] * share
            waited_s = 0.0
    return latencies


def summarize(answers: Sequence[Answer], slo: Slo) -> Summary:
    """The run lasts from the first request's start to the last one's end, failed ones included."""
    whole = [answer for answer in answers if answer.error is None]
    good = sum(slo.met_by(answer) for answer in answers)
    duration_s = 0.0
    if answers:
        duration_s = max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    output_tokens = sum(answer.num_tokens for answer in whole)
    itls = [itl for answer in whole for itl in inter_token_latencies(answer.arrivals_s, answer.num_tokens)]
    return Summary(
        requests=len(answers),
        failed=len(answers) - len(whole),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        duration_s=duration_s,
        request_rate=len(whole) * per_s,
        output_token_rate=output_tokens * per_s,
        output_tokens=output_tokens,
        chunks=sum(len(answer.arrivals_s) for answer in whole),
        short_answers=sum(answer.num_tokens != answer.max_tokens for answer in whole),
        without_usage=sum(not answer.has_usage for answer in whole),
        good_share=good / len(answers) if answers else None,
        good_rate=good * per_s,
        ttft_ms=spread_ms([answer.ttft_s for answer in whole]),
        itl_ms=spread_ms(itls),
        tpot_ms=spread_ms([tpot for answer in whole if (tpot := answer.tpot_s) is not None]),
        e2e_ms=spread_ms([answer.e2e_s for answer in whole]),
    )
