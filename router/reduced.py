"""Streams of which a client sees less than was generated; each implements `router.request.RequestStream`.

BestOf        `best_of` over `n`: the likeliest n of all choices, known only when all have ended
PromptAlone   `max_tokens: 0` with `echo`: the prompt and its log-probabilities. One token is generated, since a
              request without output has no place in a scheduler, and not shown
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.ask import Ask
from twostroke.router.prepare import GenerateParams
from twostroke.router.request import ChoiceEnd, Delta, PromptScores, RequestReport, RequestStream, StreamItem


def with_best_of(
    params: GenerateParams, best_of: int | None, limits: LimitsSection, *, num_prompts: int = 1, continued: bool
) -> GenerateParams:
    """What is to be generated so that `params.n` choices of each prompt can be shown. Raises InvalidRequest."""
    num_made, field = (params.n, "n") if best_of is None else (best_of, "best_of")
    if num_made < params.n:
        raise InvalidRequest(f"best_of must be at least n, {params.n}", "best_of")
    if continued and num_made > params.n:
        raise InvalidRequest("one choice is continued: best_of over n has none to choose from", "best_of")
    num_choices = num_prompts * num_made
    if num_choices > limits.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with {field} {num_made} are {num_choices} choices; at most {limits.max_choices}",
            "prompt" if num_prompts > 1 else field,
        )
    if num_made == params.n:
        return params
    return replace(params, n=num_made, logprobs=params.logprobs or 0)


def check_prompt_alone(min_tokens: int) -> None:
    """Raises InvalidRequest when output is wanted after all."""
    if min_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is over max_tokens 0", "min_tokens")


def reduction(ask: Ask) -> Callable[[RequestStream], RequestStream] | None:
    """What makes of a stream the one that its client sees; None: nothing, it sees all."""
    if ask.prompt_alone:
        return PromptAlone
    return partial(BestOf, num_shown=ask.num_shown) if ask.num_shown < ask.params.n else None


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: ChoiceEnd | None = None

    @property
    def mean_logprob(self) -> float:
        """Of a token: OpenAI's measure of the best choice (API reference, `best_of`)."""
        return sum(told.logprob for told in self.logprobs) / max(len(self.logprobs), 1)


class BestOf:
    """The stream's request asks for log-probabilities. Usage counts every choice, shown or not, as OpenAI does."""

    def __init__(self, stream: RequestStream, num_shown: int) -> None:
        self._stream = stream
        self._num_shown = num_shown

    async def cancel(self) -> None:
        await self._stream.cancel()

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        choices: dict[int, _Choice] = {}
        async with aclosing(aiter(self._stream)) as items:
            async for item in items:
                match item:
                    case Delta(choice, text, token_ids, logprobs):
                        made = choices.setdefault(choice, _Choice())
                        made.texts.append(text)
                        made.token_ids += token_ids
                        made.logprobs += logprobs
                    case ChoiceEnd(choice):
                        choices.setdefault(choice, _Choice()).end = item
                    case PromptScores():
                        yield item
                    case RequestReport():
                        best = sorted(choices.values(), key=lambda made: -made.mean_logprob)[: self._num_shown]
                        for shown in self._show(best):
                            yield shown
                        reasons = tuple(made.end.finish_reason for made in best if made.end is not None)
                        yield replace(item, finish_reasons=reasons)

    @staticmethod
    def _show(best: list[_Choice]) -> list[StreamItem]:
        items: list[StreamItem] = []
        for index, made in enumerate(best):
            items.append(Delta(index, "".join(made.texts), tuple(made.token_ids), tuple(made.logprobs)))
            if made.end is not None:
                items.append(replace(made.end, choice=index))
        return items


class PromptAlone:
    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream

    async def cancel(self) -> None:
        await self._stream.cancel()

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        async with aclosing(aiter(self._stream)) as items:
            async for item in items:
                match item:
                    case PromptScores():
                        yield item
                    case ChoiceEnd(choice):
                        yield ChoiceEnd(choice, FinishReason.LENGTH, 0)
                    case RequestReport():
                        reasons = (FinishReason.LENGTH,) * len(item.finish_reasons)
                        yield replace(item, completion_tokens=0, finish_reasons=reasons)
                    case Delta():
                        pass
