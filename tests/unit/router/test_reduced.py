"""Which of several choices are the best, and how they are shown."""

from collections.abc import AsyncGenerator, Mapping

from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.reduced import BestOf
from twostroke.router.request import ChoiceEnd, Delta, PromptScores, RequestReport, StreamItem

SCORES = PromptScores(0, (TokenLogprob(-1.0, 1),))


class Said:
    """A stream of choices whose tokens have these log-probabilities, a token at a time in turn."""

    def __init__(self, choices: Mapping[int, list[float]]) -> None:
        self._choices = choices
        self.cancelled = False

    async def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        yield SCORES
        for place in range(max(map(len, self._choices.values()))):
            for choice, values in self._choices.items():
                if place < len(values):
                    told = TokenLogprob(values[place], 1)
                    yield Delta(choice, f"{choice}", (10 * choice + place,), (told,))
                if place == len(values) - 1:
                    reason = FinishReason.STOP if choice % 2 else FinishReason.LENGTH
                    yield ChoiceEnd(choice, reason, len(values))
        total = sum(map(len, self._choices.values()))
        reasons = (FinishReason.STOP,) * len(self._choices)
        phases = dict.fromkeys(
            ("duration_ms", "ttft_ms", "itl_ms", "queue_ms", "route_ms", "reserve_ms", "prefill_ms", "transfer_ms"), 0.0
        )
        yield RequestReport(7, total, 0, **phases, decode_ms=0.0, finish_reasons=reasons)


async def test_the_mean_of_a_token_decides_and_not_the_length() -> None:
    stream = Said({0: [-1.0, -1.0], 1: [-3.0], 2: [-0.5] * 5})
    items = [item async for item in BestOf(stream, 2)]
    report = items.pop()
    assert items == [
        SCORES,
        Delta(0, "22222", (20, 21, 22, 23, 24), (TokenLogprob(-0.5, 1),) * 5),
        ChoiceEnd(0, FinishReason.LENGTH, 5),
        Delta(1, "00", (0, 1), (TokenLogprob(-1.0, 1),) * 2),
        ChoiceEnd(1, FinishReason.LENGTH, 2),
    ]
    assert isinstance(report, RequestReport)
    assert (report.completion_tokens, report.finish_reasons) == (8, (FinishReason.LENGTH,) * 2)


async def test_it_is_cancelled_through() -> None:
    stream = Said({0: [-1.0]})
    await BestOf(stream, 1).cancel()
    assert stream.cancelled
