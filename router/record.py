"""What the dispatcher remembers of a live request: mutable records, owned by `router.lifecycle` alone.

RequestRecord  one a request: its stream, deadline and choices
ChoiceRecord   one a choice: its pure state, its place in the queue, its present attempt, its end once known
Attempt        one placement of a choice on one or two workers; gone when it is released
"""

import asyncio
from dataclasses import field, replace

from twostroke.cluster.core.ids import Incarnation, JobId
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import JobTimings, Lease, TokenRun
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.admission import Entry
from twostroke.router.choice_state import ChoiceState
from twostroke.router.fleet import PromptKeys
from twostroke.router.loss import Side, Standing
from twostroke.router.request import Continuation, GenerateRequest, TextDecoder
from twostroke.router.stream import BufferedStream


@dataclass(slots=True)
class Attempt:
    job: JobId
    kind: str
    """`pair`, `local` or `one_token`."""
    prefill: WorkerLink | None
    decode: WorkerLink | None
    after_loss: bool
    """Counts against the limit of continuations until its first token."""
    lease: Lease | None = None
    renewed_at: float = 0.0
    renewing: bool = False
    """The lease's epoch is being raised; the next `Leased` wants another prefill worker."""
    prefill_asked: bool = False
    started: bool = False
    prefill_over: bool = False
    decode_over: bool = False

    @property
    def silent(self) -> bool:
        """Nobody has anything more to say about it."""
        waits_for_prefill = self.prefill is not None and self.prefill_asked and not self.prefill_over
        return not waits_for_prefill and (self.decode is None or self.decode_over)

    def side_of(self, link: WorkerLink) -> Side | None:
        if link is self.decode:
            return Side.DECODE
        return Side.PREFILL if link is self.prefill else None

    def is_over(self, side: Side) -> bool:
        return self.prefill_over if side is Side.PREFILL else self.decode_over

    def end_side(self, side: Side) -> None:
        if side is Side.PREFILL:
            self.prefill_over = True
        else:
            self.decode_over = True


@dataclass(frozen=True, slots=True)
class End:
    reason: FinishReason
    num_output: int
    by_text: bool = False
    """A stop string ended it: what the decoder still holds back is not text of the answer."""
    stop: str = ""
    """That stop string."""


@dataclass(slots=True)
class ChoiceRecord:
    request: "RequestRecord"
    state: ChoiceState
    decoder: TextDecoder
    entry: "Entry[ChoiceRecord] | None" = None
    queued: bool = False
    attempt: Attempt | None = None
    keys: PromptKeys | None = None
    """Of prompt and delivered tokens; made anew when a continuation has more of these."""
    after_loss: bool = False
    avoid: set[Incarnation] = field(default_factory=set)
    refused: set[Incarnation] = field(default_factory=set)
    workerless_since: float | None = None
    end: End | None = None
    finish_by: float = 0.0
    """When the end is not held up any longer for the prefill side's figures."""
    cached_tokens: int | None = None
    """Of prompt and delivered tokens; None until a worker has begun."""
    prefill_timings: JobTimings = JobTimings()
    decode_timings: JobTimings = JobTimings()
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_told: int = 0
    """Output tokens that the reader has; those of earlier parts of the answer among them."""
    told_at: float | None = None
    """When the last of them came."""
    prompt_told: bool = False
    """The reader has the prompt's log-probabilities."""
    withheld: list[TokenRun] = field(default_factory=list)
    """Of this attempt, come before the prompt's log-probabilities, which another worker tells: not taken yet."""

    @property
    def awaits_prompt(self) -> bool:
        """The prompt's log-probabilities are wanted, and are not all here. Until they are, no token is taken, so that
        after a loss the choice begins anew.
        """
        if self.state.sampling.prompt_logprobs is None or self.prompt_told:
            return False
        return len(self.state.prompt_logprobs) < len(self.request.request.prompt) - 1

    @property
    def number(self) -> int:
        """As the client counts."""
        return self.request.request.first_choice + self.state.number

    @property
    def continuation(self) -> Continuation | None:
        """Where it would go on, if it was the output budget that ended it."""
        request = self.request.request
        if self.end is None or self.end.reason is not FinishReason.LENGTH or not request.ends_by_budget:
            return None
        assert request.continuation is not None
        return replace(request.continuation, choice=self.number, tokens=tuple(self.state.tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.request.request.prompt) + len(self.state.tokens)

    @property
    def complete(self) -> bool:
        return self.end is not None and len(self.state.tokens) >= self.end.num_output

    def standing(self, side: Side) -> Standing:
        """Legal while there is an attempt."""
        assert self.attempt is not None
        return Standing(
            phase=self.state.phase,
            leased=self.attempt.lease is not None,
            started=self.attempt.started,
            progressed=self.state.progressed,
            complete=self.complete,
            side_over=self.attempt.is_over(side),
        )


@dataclass(slots=True)
class RequestRecord:
    request: GenerateRequest
    stream: BufferedStream
    accepted_at: float
    deadline_at: float
    deadline: asyncio.TimerHandle | None = None
    choices: list[ChoiceRecord] = field(default_factory=list)
    siblings_started: bool = False
    route_s: float = 0.0
    """Choice 0's time in placement decisions, a part of its time in the queue."""
