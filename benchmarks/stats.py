"""Statistics over finished requests. Pure: lists of times in, numbers out.

TTFT   request sent to first token            E2E   request sent to last token
ITL    gaps between tokens; tokens that arrive in one chunk share the gap before it evenly
TPOT   (E2E - TTFT) / (tokens - 1), of answers with two tokens or more
goodput   requests whose TTFT and mean ITL are within the SLOs, a second (DistServe, OSDI'24)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it, in seconds from the start of the run."""

    sent_s: float
    chunks: tuple[float, ...]
    """Arrival of each chunk that carried tokens."""
    num_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunks[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.chunks[-1] - self.sent_s

    def gaps_s(self) -> list[float]:
        """One gap for each token after the first chunk's, so that they sum to E2E - TTFT."""
        gaps: list[float] = []
        later = len(self.chunks) - 1
        tokens = max(self.num_tokens - 1, later)
        for index in range(later):
            share = tokens * (index + 1) // later - tokens * index // later
            gap = self.chunks[index + 1] - self.chunks[index]
            gaps += [gap / share] * share
        return gaps


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90 and p99 in milliseconds."""
    mean = sum(values) / len(values) if values else 0.0
    named = {"mean": mean, **{f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}}
    return {name: 1000 * value for name, value in named.items()}


def summarize(
    answers: Sequence[Answer], duration_s: float, slo_ttft_ms: float | None = None, slo_itl_ms: float | None = None
) -> dict[str, object]:
    """Everything that is reported of one run; failed requests count in `errors` only."""
    good = [answer for answer in answers if not answer.error and answer.chunks]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer not in good:
            errors[answer.error or "no token"] = errors.get(answer.error or "no token", 0) + 1
    gaps = [gap for answer in good for gap in answer.gaps_s()]
    within = [answer for answer in good if _within(answer, slo_ttft_ms, slo_itl_ms)]
    tokens = sum(answer.num_tokens for answer in good)
    return {
        "requests": len(answers),
        "errors": errors,
        "duration_s": duration_s,
        "output_tokens": tokens,
        "request_throughput": len(good) / duration_s if duration_s else 0.0,
        "output_throughput": tokens / duration_s if duration_s else 0.0,
        "goodput": len(within) / duration_s if duration_s else 0.0,
        "goodput_share": len(within) / len(answers) if answers else 0.0,
        "ttft_ms": spread([answer.ttft_s for answer in good]),
        "itl_ms": spread(gaps),
        "tpot_ms": spread(
            [(answer.e2e_s - answer.ttft_s) / (answer.num_tokens - 1) for answer in good if answer.num_tokens > 1]
        ),
        "e2e_ms": spread([answer.e2e_s for answer in good]),
    }


def _within(answer: Answer, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    gaps = answer.gaps_s()
    mean_itl_ms = 1000 * sum(gaps) / len(gaps) if gaps else 0.0
    return (slo_ttft_ms is None or 1000 * answer.ttft_s <= slo_ttft_ms) and (
        slo_itl_ms is None or mean_itl_ms <= slo_itl_ms
    )
