"""How one choice's tokens are drawn. Validated at the edge (gateway, gRPC); workers trust it."""

from enum import Enum

from twostroke.cluster.core.grammar import Grammar
from twostroke.cluster.core.records import dataclass


class FinishReason(Enum):
    """Why an answer is complete, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one choice. The seed is already the choice's own (`core.random.choice_seed`).

    `max_tokens` and `min_tokens` count output tokens from index 0, delivered ones included, so that a
    continuation needs no arithmetic. `end_token_ids` are the model's own ends, which `ignore_eos` turns off;
    `stop_token_ids` are the client's, which it does not. Neither is sampled before `min_tokens`.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 0.0
    """0 is greedy: the smallest id among the largest logits."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens, as in CTRL (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Over output tokens only, as is `frequency_penalty`."""
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """What the text must look like; where it may be complete, one of `end_token_ids` ends it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before penalties; ids are unique."""
    logprobs: int | None = None
    """Tell each output token's log-probability, and this many of the most likely tokens; None: tell none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens from the second on. Such a prompt is computed whole: no prefix is read."""

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end the answer when sampled at or after `min_tokens`."""
        return frozenset(self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.end_token_ids)

    def finish_after(self, num_output: int, token: int) -> FinishReason | None:
        """The end, if any, once `token` is the answer's `num_output`-th token (1-based)."""
        # Not `in self.ends`: this runs for every token, and building the set costs more than both look-ups.
        is_end = token in self.stop_token_ids or (not self.ignore_eos and token in self.end_token_ids)
        if is_end and num_output > self.min_tokens:
            return FinishReason.STOP
        if num_output >= self.max_tokens:
            return FinishReason.LENGTH
        return None
