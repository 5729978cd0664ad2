"""One choice of a request, as pure state: its phase, its attempts, and its tokens in order.

    tokens     0 .. n-1 are delivered, in order and for ever; a continuation goes on at n
    early      tokens past n that came before their turn (two workers speak on two streams): at most MAX_EARLY
    attempt    counts up with every placement; messages of older attempts are not this choice's any more
    phase      changes only by `move`, through the one transition table; the time spent in each is summed up

`accept` drops duplicates that agree, and raises TokensConflict for one that differs, or when too many are early: then
the attempt is wrong, not the choice.
"""

from dataclasses import dataclass, field

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import PromptLogprobs, TokenRun
from twostroke.cluster.core.request import Phase, advance
from twostroke.cluster.core.sampling import FinishReason, SamplingParams

MAX_EARLY = 64


class TokensConflict(InternalError):
    """The workers of an attempt contradict each other, or lost a token."""


@dataclass(slots=True)
class ChoiceState:
    request_id: RequestId
    number: int
    sampling: SamplingParams
    """With the choice's own seed."""
    since: float
    """When the present phase began, monotonic seconds."""
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    losses: int = 0
    preemptions: int = 0
    tokens: list[int] = field(default_factory=list)
    attempt_base: int = 0
    """How many tokens were delivered when the present attempt began."""
    duplicates: int = 0
    spent_s: dict[Phase, float] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, in order, as far as they have come."""
    _early: dict[int, int] = field(default_factory=dict)
    _logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """By output index: of early tokens, and of those that `take_logprobs` is still to be asked for."""

    @property
    def job(self) -> JobId:
        """The present attempt's."""
        return JobId(self.request_id, self.number, self.attempt)

    @property
    def live(self) -> bool:
        return self.phase not in (Phase.FINISHED, Phase.CANCELLED, Phase.FAILED)

    @property
    def progressed(self) -> bool:
        """True when this attempt has delivered a token."""
        return len(self.tokens) > self.attempt_base

    @property
    def one_to_go(self) -> bool:
        return self.sampling.max_tokens - len(self.tokens) == 1

    def move(self, to: Phase, now: float) -> None:
        """Raises InternalError for a move that the table forbids."""
        target = advance(self.phase, to)
        self.spent_s[self.phase] = self.spent_s.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = target, now

    def begin_attempt(self) -> JobId:
        """Number the next attempt; tokens that came early for the last one are forgotten."""
        self.attempt += 1
        self.attempt_base = len(self.tokens)
        self._early.clear()
        self._logprobs.clear()
        return self.job

    def accept(self, run: TokenRun) -> tuple[int, ...]:
        """The tokens that are now in order, to be delivered. Raises TokensConflict."""
        before = len(self.tokens)
        if self.sampling.logprobs is not None:
            self._note_logprobs(run)
        if run.first_index == before and len(run.tokens) == 1 and not self._early:
            self.tokens += run.tokens  # nearly every message
            return run.tokens
        for index, token in enumerate(run.tokens, run.first_index):
            known = self.tokens[index] if index < len(self.tokens) else self._early.get(index)
            if known is not None:
                if known != token:
                    raise TokensConflict(f"output token {index} of {run.job} is {known} and {token}")
                self.duplicates += 1
            elif index == len(self.tokens):
                self.tokens.append(token)
                self._take_early()
            elif len(self._early) < MAX_EARLY:
                self._early[index] = token
            else:
                raise TokensConflict(f"output token {len(self.tokens)} of {run.job} is missing; {MAX_EARLY} are early")
        return tuple(self.tokens[before:])

    def _note_logprobs(self, run: TokenRun) -> None:
        if len(run.logprobs) != len(run.tokens):
            raise TokensConflict(f"{len(run.logprobs)} log-probabilities of {len(run.tokens)} tokens of {run.job}")
        for index, value in enumerate(run.logprobs, run.first_index):
            if index >= len(self.tokens):
                self._logprobs.setdefault(index, value)

    def take_logprobs(self, first: int, end: int) -> tuple[TokenLogprob, ...]:
        """Of delivered tokens `first .. end - 1`, once; empty when they were not asked for."""
        if self.sampling.logprobs is None:
            return ()
        return tuple(self._logprobs.pop(index) for index in range(first, end))

    def accept_prompt(self, message: PromptLogprobs) -> None:
        """Add what is new of it. Raises TokensConflict when something before it is missing."""
        missing = len(self.prompt_logprobs) + 1 - message.first
        if missing < 0:
            raise TokensConflict(f"the prompt's log-probabilities go on at {message.first}, {-missing} too far")
        self.prompt_logprobs.extend(message.logprobs[missing:])

    def _take_early(self) -> None:
        while (token := self._early.pop(len(self.tokens), None)) is not None:
            self.tokens.append(token)

    def natural_end(self) -> FinishReason | None:
        """The end that the delivered tokens themselves imply: nothing is left to compute."""
        if not self.tokens:
            return None
        return self.sampling.finish_after(len(self.tokens), self.tokens[-1])
