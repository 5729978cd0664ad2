"""A request as the gateway hands it to the dispatcher, and what comes back, as plain data.

Gateway and gRPC API validate, tokenize and set the deadline; from `Dispatcher.submit` on the dispatcher owns the
request. The caller iterates the returned stream; leaving it early (closing the iterator) cancels the request.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import field
from typing import NamedTuple, Protocol

from twostroke.cluster.core.ids import RequestId, WorkerId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import LoadReport, Role
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """What it takes to go on with an answer, beside the request; clients hold it sealed (`router.continuation`)."""

    choice: int
    seed: int
    """The request's, drawn or sent; the choice's own is derived from it."""
    max_tokens: int
    """Of the whole answer, `tokens` included."""
    model: bytes
    """Digest of the model's name, weights and page layout."""
    binding: bytes
    """Digest of all in the request that shapes its answer."""
    tokens: tuple[int, ...] = ()
    """The answer so far."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: RequestId
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    """`seed` is the request's; the dispatcher derives each choice's."""
    time_left_s: float
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    tenant: str = "default"
    salt: str = ""
    adapter: str = ""
    client_request_id: str = ""
    priority: int = 0
    """Lower goes first (`router.admission`)."""
    template: str = ""
    """Version of the prompt templates that made the prompt, for the log line."""
    whole: bool = False
    """The client wants the answer in one piece: who reads its stream need not hear of each token at once."""
    grammar_field: str = "response_format"
    """Where the client put the grammar, if it sent one."""
    continuation: Continuation | None = None
    """Of a request under an output budget, or after one: where it begins. `sampling.max_tokens` is then where it ends,
    which may be short of `continuation.max_tokens`. With tokens there is one choice, numbered `continuation.choice`.
    """

    @property
    def delivered(self) -> tuple[int, ...]:
        """Output tokens that the client has from earlier parts of the answer; never told or counted again."""
        return () if self.continuation is None else self.continuation.tokens

    @property
    def first_choice(self) -> int:
        """Choices are numbered from here, in the stream and for their seeds."""
        return 0 if self.continuation is None else self.continuation.choice

    @property
    def ends_by_budget(self) -> bool:
        """An answer of `sampling.max_tokens` tokens has more to say."""
        return self.continuation is not None and self.continuation.max_tokens > self.sampling.max_tokens


class Delta(NamedTuple):
    """New text of one choice. `token_ids` are the tokens since the last delta; text may lag behind them.

    Made for every token, as is `TextStep`; a frozen dataclass takes three times as long to make.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token id when they were asked for."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens but the first, when they were asked for; before every Delta.

    They are choice 0's, whose prompt is that of all others.
    """

    choice: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    choice: int
    finish_reason: FinishReason
    num_output: int
    """Tokens counted in usage: up to and including the one that completed a stop string; without delivered ones."""
    stop: str = ""
    """The stop string that ended it; empty for every other end."""
    continuation: Continuation | None = None
    """When the output budget ended it: where it would go on. Text that was held back comes then, not now."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Last item of every complete stream: usage, and where the time went (choice 0, milliseconds).

    The phases `queue` to `decode` are durations on the router's clock and sum to `duration_ms`; the `worker_*`
    fields are durations on each worker's own clock.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    duration_ms: float
    ttft_ms: float
    itl_ms: float
    queue_ms: float
    route_ms: float
    reserve_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    worker_prefill_ms: float = 0.0
    worker_transfer_busy_ms: float = 0.0
    worker_transfer_exposed_ms: float = 0.0
    worker_decode_ms: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    pages_shipped: int = 0
    bytes_shipped: int = 0
    attempts: int = 1
    reason: str = ""
    """Why the placement was chosen."""
    finish_reasons: tuple[FinishReason, ...] = field(default=())


StreamItem = PromptScores | Delta | ChoiceEnd | RequestReport


class RequestStream(Protocol):
    """Items of one request. Iteration raises a TwostrokeError when the request fails; nothing comes after it.

    It is a generator, so that a reader who stops early can close it at once (`contextlib.aclosing`).
    """

    def __aiter__(self) -> AsyncGenerator[StreamItem, None]: ...

    async def cancel(self) -> None:
        """Idempotent. Ends iteration and tells both workers."""
        ...


class Generator(Protocol):
    """What the HTTP and gRPC faces need of the router; implemented by `router.dispatcher.Dispatcher`."""

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Admit or refuse at once. Raises InvalidRequest, UnknownModel, Overloaded or Unavailable."""
        ...

    def cancel(self, request_id: RequestId) -> bool:
        """Cancel by id; False when no such request is live."""
        ...

    @property
    def model(self) -> "ServedModel | None":
        """What the attached workers serve; None until the first one attached."""
        ...

    @property
    def ready(self) -> bool:
        """True when a request could be answered now (invariant 13)."""
        ...

    @property
    def num_live(self) -> int:
        """Requests that were taken on and have not ended."""
        ...

    def loads(self) -> "list[WorkerLoad]":
        """What each attached worker last said that it holds."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_context: int
    page_size: int
    num_prefill_workers: int
    num_decode_workers: int
    fingerprint: str = ""
    """Of weights and page layout, as workers publish it."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    worker_id: WorkerId
    role: Role
    report: LoadReport | None
    """None until the first one came."""
    num_pages: int
    draining: bool


class TextDecoder(Protocol):
    """Turns one choice's tokens into text, holding back what may be part of a stop string or a character."""

    def push(self, token: int) -> "TextStep": ...

    def skip(self, tokens: Sequence[int]) -> None:
        """Begin after these, whose text was told before: what they hold back may still become text."""
        ...

    def finish(self) -> str:
        """Text held back, once the answer ended for another reason than a stop string."""
        ...


class TextStep(NamedTuple):
    """Text that is now certain; `stopped` when a stop string was completed (the text ends before it)."""

    text: str
    stopped: bool
    stop: str = ""
    """The stop string that was completed: of several by the same character the longest."""


class TextDecoderFactory(Protocol):
    def __call__(self, stop: tuple[str, ...]) -> TextDecoder: ...
