"""What one asks and what comes back, as plain data, the same over HTTP and gRPC."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it; cut short where the answer was."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """system, user, assistant or tool."""
    content: str
    reasoning: str = ""
    """An assistant's, before the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's."""
    tool_call_id: str = ""
    """Of the call that a tool's message answers."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, object] | None = None
    """JSON schema of its arguments, an object's; None: it has none."""
    description: str = ""
    strict: bool = False
    """Calls follow the schema, also where none is required."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a conversation offers, and whether it must be used."""

    offered: tuple[Tool, ...]
    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] = ()
    """Names of those that may be called; empty: all."""
    parallel: bool = True
    """False: one call at most."""


Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or a conversation that the model's chat template is applied to."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """None is the server's default; ranges are the server's to check."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """0 to 2^64 - 1; the same seed gives the same answer."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    """Token id to what is added to its logit."""
    logprobs: int | None = None
    """With log-probabilities, of each token and of this many of the likeliest at its place."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as it is sent by each attempt at it."""

    model: str
    prompt: Prompt
    sampling: Sampling
    cache_salt: str
    continuation: str
    tools: Tools | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    """Its text; a special token's name; of one that is no whole characters `bytes:\\xe2\\x82`."""
    logprob: float
    top: tuple[tuple[str, float], ...]
    """The likeliest at this place, best first."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new of a tool call. Calls come one after the other."""

    index: int
    """Among the answer's calls, from 0."""
    id: str
    """With a call's first piece, as its name; then empty."""
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and what came with it: text may lag behind tokens."""

    text: str
    token_ids: tuple[int, ...] = ()
    """Over gRPC only."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """When they were asked for, in all one a token."""
    reasoning: str = ""
    """Of a model that marks it, in answers to conversations; never part of the text. So are calls."""
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    """The router's, for its logs and for `GrpcClient.cancel`."""
    text: str
    token_ids: tuple[int, ...]
    """Empty over HTTP."""
    finish_reason: str
    """stop, length or tool_calls."""
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    continuation: str = ""
    """When the server's output budget ended it: asked with the same and this, the answer goes on."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """For the conversation that goes on."""
        return Message("assistant", self.text, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    max_context: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    worker_id: str
    role: str
    """prefill or decode."""
    known: bool
    """False until the router had the first report: then the counts are 0."""
    running: int
    waiting: int
    pages_free: int
    pages_total: int
    queued_tokens: int
    draining: bool
