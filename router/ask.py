"""What a client asks, over HTTP or gRPC, understood before anything is known of the model. Plain data."""

from dataclasses import field

from twostroke.cluster.core.records import dataclass
from twostroke.router.chat_template import ChatOptions, Message
from twostroke.router.prepare import GenerateParams
from twostroke.router.tools import ToolAsk

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Message]
    options: ChatOptions
    """With the tools that are shown."""
    tools: ToolAsk = field(default_factory=ToolAsk)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Raw ones: each is answered `n` times, and choice `i` answers prompt `i // n`."""

    prompts: list[tuple[str, Prompt]]
    """With the field that each stands in."""
    echo: bool = False
    """Answers begin with their prompt's text."""


@dataclass(frozen=True, slots=True)
class Ask:
    model: str
    prompt: Prompts | Chat
    params: GenerateParams = GenerateParams()
    streamed: bool = False
    include_usage: bool = False
    salt: str = ""
    top: int | None = None
    """Alternatives to show for each output token; None: no log-probabilities. `params` may ask for more."""
    num_shown: int = 1
    """Choices of each prompt that the client sees: fewer than `params.n` with `best_of`."""
    max_tokens_field: str = "max_tokens"
    """What the client calls it."""
    prompt_field: str = "messages"
    """Where a chat stands in the request."""
    field_names: tuple[tuple[str, str], ...] = ()
    """For `renaming.rewritten`: what the client calls the fields of its tools."""
    prompt_alone: bool = False
    """No output is wanted; `params` asks for a token (`router.reduced`)."""
    prompt_top: int | None = None
    """`prompt_logprobs` as asked for; an echo with log-probabilities raises that of `params`."""
    continuation: str | None = None
    """Of the choice to go on with, as an earlier answer to this request gave it."""
