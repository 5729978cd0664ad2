"""Log-probabilities of tokens as plain data, and the order in which they reach whoever wants them.

They are natural logarithms of the model's own distribution, log_softmax of its logits before temperature, penalties,
bias, grammar and any filter: what OpenAI's API and vLLM's default (`raw_logprobs`) tell. They belong to tokens: a
`TokenRun` carries those of its tokens when the job asked for them, and nothing anywhere makes them when it did not.
"""

from typing import NamedTuple

MAX_TOP = 20
"""Most alternatives that anybody may ask for, for each token."""
LOWEST = -9999.0
"""In place of minus infinity, which JSON cannot say."""


class TokenLogprob(NamedTuple):
    """Of one token and, best first, of the most likely tokens at its place; these may or may not hold it."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    """Of `top_ids`."""
