"""What the reader of a choice gets to see: the text of its tokens, in order.

A streamed answer's tokens are told as they come. Of a whole answer nobody reads a part, so its tokens wait and are told
many at once, unless a stop string may end it: that is found in the text.
"""

from twostroke.cluster.core.clock import Clock
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.record import ChoiceRecord, End
from twostroke.router.request import Delta, PromptScores

AT_ONCE = 64
"""Tokens of a whole answer that are told together."""


class Delivery:
    def __init__(self, metrics: RouterMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_told = 0
        """Not counted in the metric yet."""

    def on_tokens(self, choice: ChoiceRecord) -> int:
        """The choice has new tokens. Answers how many wait to be read."""
        choice.last_token_at = self._clock.now()
        if choice.first_token_at is None:
            choice.first_token_at = choice.last_token_at
        request = choice.request.request
        if request.whole and not request.stop and len(choice.state.tokens) - choice.num_told < AT_ONCE:
            return 0
        return self.tell(choice)

    def tell(self, choice: ChoiceRecord) -> int:
        """Turn tokens that were not told yet into text for the reader; a stop string sets the choice's end. Answers how
        many tokens wait to be read.
        """
        state, start = choice.state, choice.num_told
        tokens = state.tokens[start:]
        if not tokens:
            return 0
        text, used = "", 0
        for token in tokens:
            used += 1
            if state.sampling.finish_after(start + used, token) is FinishReason.STOP:
                break  # The end token itself is no text.
            step = choice.decoder.push(token)
            text += step.text
            if step.stopped:
                choice.end = End(FinishReason.STOP, start + used, by_text=True, stop=step.stop)
                break
        choice.num_told += len(tokens)  # what comes after an end is no part of the answer
        self._count(choice, used)
        logprobs = state.take_logprobs(start, start + used)
        return choice.request.stream.put(Delta(choice.number, text, tuple(tokens[:used]), logprobs))

    def tell_prompt(self, choice: ChoiceRecord) -> None:
        """The prompt's log-probabilities, once, before the first token."""
        if choice.state.sampling.prompt_logprobs is None or choice.prompt_told:
            return
        choice.prompt_told = True
        choice.keys = None
        choice.request.stream.put(PromptScores(choice.number, tuple(choice.state.prompt_logprobs)))
        choice.state.prompt_logprobs.clear()

    def flush(self) -> None:
        """Bring the metric of tokens up to date: for each of them it would take longer than its text."""
        self._metrics.generation_tokens.inc(self._num_told)
        self._num_told = 0

    def _count(self, choice: ChoiceRecord, count: int) -> None:
        """Tokens told together count as one observation, of their mean."""
        assert choice.last_token_at is not None
        self._num_told += count
        since, gaps = choice.told_at, count
        if since is None:
            since, gaps = choice.first_token_at, count - 1
        choice.told_at = choice.last_token_at
        if since is not None and gaps:
            self._metrics.inter_token_latency_seconds.observe((choice.last_token_at - since) / gaps)
