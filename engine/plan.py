"""A scheduler's decision as column lists: what one step computes. Plain data, no torch.

Row r is one job with `num_new[r]` tokens, of which the first is at position `num_computed[r]`:

    page_tables[r]   pages that cover positions 0 .. num_computed + num_new - 1
    tokens           new tokens of all rows, one after another
    sample[r]        True when the row's last token is the job's newest, so that its logits are sampled

Rows are ordered: decode rows (num_new == 1) first, then prefill chunks; executors may rely on it.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

from twostroke.cluster.core.ids import JobId, PageId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import SamplingParams


class ConstraintBroken(Exception):
    """A grammar cannot go on; its job ends, the others of the step do not."""


class Constraint(Protocol):
    """A job's grammar, in some state of it. Used by one thread at a time; belongs to the job and dies with it."""

    def mask(self, output: Sequence[int], ends: Sequence[int]) -> bytes:
        """Tokens that may follow `output`, one bit each, lowest bit first; `ends` among them where the text may be
        complete. `output` only ever grows from one call to the next. Raises ConstraintBroken.
        """
        ...


@dataclass(frozen=True, slots=True)
class SampleInput:
    """What sampling one row needs beyond logits. The lists are the job's own: read, never kept or changed."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    """Output tokens so far; the sampled token gets output index `len(output)`."""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """Prompt tokens whose log-probabilities one row computes: each new token of the row, as far as there are `targets`,
    is scored on the target that follows it.
    """

    top: int
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: list[JobId]
    num_computed: list[int]
    num_new: list[int]
    tokens: list[int]
    page_tables: list[Sequence[PageId]]
    sample: list[SampleInput | None]
    score: dict[int, ScoreInput] = field(default_factory=dict)
    """By row; only rows that are scored."""

    @property
    def num_rows(self) -> int:
        return len(self.jobs)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens` has one entry a row of the plan: the sampled token, or None where the row was not sampled."""

    tokens: list[int | None]
    broken: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar could not go on, and why; they have no token."""
    late: frozenset[int] = frozenset()
    """Rows whose grammar's mask was not ready; as if they had taken no part in the step."""
    logprobs: dict[JobId, TokenLogprob] = field(default_factory=dict)
    """Of sampled tokens, for jobs that asked for them."""
    scores: dict[JobId, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """One for each target of a scored row."""
