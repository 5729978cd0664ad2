"""The deterministic executor: no torch, no weights, and an answer that depends on every slot it reads.

Each new token's id and position + 1 are written into its slot (as k and v of a one-layer, one-head uint32
page). A sampled row reads the whole context back through its page table and hashes it; the next token is that
hash, so one wrong, stale, missing or swapped page changes the answer. `golden` says what the answer must be.

Its distribution, as told by log-probabilities: the greedy token is the most likely, the id after it (round the
vocabulary) the next, and so on, each a sixteenth less than the one before; `golden_logprobs` says what must be told.
"""

import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.ids import JobId, PageId
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.random import uniform
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.masks import compute_masks
from twostroke.engine.plan import Constraint, Plan, SampleInput, ScoreInput, StepResult

GREEDY = SamplingParams(max_tokens=1 << 30)


def fake_layout(page_size: int) -> PageLayout:
    return gqa_layout(model_fingerprint="fake", layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=page_size)


def next_token(
    ids: "array[int]",
    marks: "array[int]",
    num_output: int,
    params: SamplingParams,
    vocab_size: int,
    allowed: bytes | None = None,
) -> int:
    """The token after a context whose slots hold `ids` and `marks` (position + 1), both `array("I")`.

    With temperature it also depends on the seed and output index `num_output`; ends are not chosen before
    `min_tokens`, so a vocabulary of ends alone is refused by the caller's own validation, not here. `allowed` is a
    grammar's mask, which has at least one bit set: the next token up that it allows is taken.
    """
    digest = blake2b(ids.tobytes(), digest_size=8)
    digest.update(marks.tobytes())
    if params.temperature > 0:
        digest.update(uniform(params.seed, num_output).hex().encode())
    token = int.from_bytes(digest.digest(), "little") % vocab_size
    if params.logit_bias:
        token = _biased(token, dict(params.logit_bias), vocab_size)
    if num_output < params.min_tokens:
        for _ in range(vocab_size):
            if token not in params.ends:
                break
            token = (token + 1) % vocab_size
    while allowed is not None and not allowed[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % vocab_size
    return token


def _biased(likeliest: int, biases: dict[int, float], vocab_size: int) -> int:
    plain = next((rank for rank in range(vocab_size) if (likeliest + rank) % vocab_size not in biases), None)
    scores = {token: bias + _logprob((token - likeliest) % vocab_size) for token, bias in biases.items()}
    if plain is not None:
        scores[(likeliest + plain) % vocab_size] = _logprob(plain)
    return min(scores, key=lambda token: (-scores[token], token))


def _logprob(rank: int) -> float:
    """`rank` from 0. Exact in float32."""
    return -(rank + 1) / 16


def _token_logprob(ids: "array[int]", marks: "array[int]", token: int, top: int, vocab_size: int) -> TokenLogprob:
    likeliest = next_token(ids, marks, 0, GREEDY, vocab_size)
    rank = (token - likeliest) % vocab_size
    ranks = range(min(top, vocab_size))
    top_ids = tuple((likeliest + place) % vocab_size for place in ranks)
    return TokenLogprob(_logprob(rank), rank + 1, top_ids, tuple(_logprob(place) for place in ranks))


def golden_logprobs(tokens: Sequence[int], first: int, top: int, vocab_size: int) -> list[TokenLogprob]:
    """What must be told of `tokens[first:]`, each after all before it; `first` is at least 1."""
    told: list[TokenLogprob] = []
    for length in range(first, len(tokens)):
        ids, marks = array("I", tokens[:length]), array("I", range(1, length + 1))
        told.append(_token_logprob(ids, marks, tokens[length], top, vocab_size))
    return told


def golden(
    prompt: Sequence[int],
    num: int,
    vocab_size: int,
    params: SamplingParams = GREEDY,
    constraint: Constraint | None = None,
) -> list[int]:
    """The first `num` output tokens after `prompt`, fewer where `params` end the answer earlier."""
    ids = array("I", prompt)
    output: list[int] = []
    while len(output) < num:
        allowed = None if constraint is None else constraint.mask(output, params.end_token_ids)
        token = next_token(ids, array("I", range(1, len(ids) + 1)), len(output), params, vocab_size, allowed)
        output.append(token)
        ids.append(token)
        if params.finish_after(len(output), token) is not None:
            break
    return output


class FakeHandle:
    def __init__(self, result: StepResult, delay_s: float) -> None:
        self._result = result
        self._delay_s = delay_s

    def result(self) -> StepResult:
        if self._delay_s > 0:
            time.sleep(self._delay_s)
        return self._result


class FakeExecutor:
    """Implements `engine.executor.Executor`. `step_delay_s` is how long a step's result lets wait."""

    def __init__(
        self, num_pages: int, page_size: int, vocab_size: int, max_positions: int, step_delay_s: float = 0.0
    ) -> None:
        self._page_size = page_size
        self._memory = BytePages(fake_layout(page_size), num_pages)
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._step_delay_s = step_delay_s
        self.num_bad_reads = 0
        """Contexts read with a slot that did not hold its position; 0 unless pages were mixed up."""

    @property
    def memory(self) -> BytePages:
        return self._memory

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int:
        return self._max_positions

    def launch(self, plan: Plan) -> FakeHandle:
        start = 0
        masks = compute_masks(plan)
        result = StepResult([], broken=masks.broken)
        rows = zip(plan.page_tables, plan.num_computed, plan.num_new, plan.sample, strict=True)
        for row, (pages, num_computed, num_new, sample) in enumerate(rows):
            self._write(pages, num_computed, plan.tokens[start : start + num_new])
            start += num_new
            length = num_computed + num_new
            if row in plan.score:
                result.scores[plan.jobs[row]] = self._score(pages, num_computed, length, plan.score[row])
            token = None
            if sample is not None and row not in masks.broken:
                allowed = masks.bits.get(row)
                token = self._sample(pages, length, sample, plan.jobs[row], result.logprobs, allowed)
            result.tokens.append(token)
        return FakeHandle(result, self._step_delay_s)

    def _write(self, pages: Sequence[PageId], first: int, tokens: Sequence[int]) -> None:
        """Put each token and its mark into its slot, page by page."""
        size = self._page_size
        end = first + len(tokens)
        for index in range(first // size, -(-end // size)):
            low, high = max(first, index * size), min(end, (index + 1) * size)
            slots = self._memory.page(pages[index]).cast("I")
            offset = low - index * size
            count = high - low
            slots[offset : offset + count] = array("I", tokens[low - first : high - first])
            slots[size + offset : size + offset + count] = array("I", range(low + 1, high + 1))

    def _sample(
        self,
        pages: Sequence[PageId],
        length: int,
        sample: SampleInput,
        job: JobId,
        logprobs: dict[JobId, TokenLogprob],
        allowed: bytes | None,
    ) -> int:
        ids, marks = self._read(pages, length)
        params = sample.params
        token = next_token(ids, marks, len(sample.output), params, self._vocab_size, allowed)
        if params.logprobs is not None:
            logprobs[job] = _token_logprob(ids, marks, token, params.logprobs, self._vocab_size)
        return token

    def _score(
        self, pages: Sequence[PageId], num_computed: int, length: int, score: ScoreInput
    ) -> tuple[TokenLogprob, ...]:
        ids, marks = self._read(pages, length)
        ends = range(num_computed + 1, num_computed + 1 + len(score.targets))
        return tuple(
            _token_logprob(ids[:end], marks[:end], target, score.top, self._vocab_size)
            for end, target in zip(ends, score.targets, strict=True)
        )

    def _read(self, pages: Sequence[PageId], length: int) -> "tuple[array[int], array[int]]":
        """The context's ids and marks. Raises IndexError when the page table is too short for it."""
        size = self._page_size
        if len(pages) != -(-length // size):
            raise IndexError(f"{len(pages)} pages for {length} tokens of page size {size}")
        slots = self._memory.read(pages).cast("B").cast("I")
        ids, marks = array("I"), array("I")
        for base in range(0, 2 * size * len(pages), 2 * size):
            ids.frombytes(slots[base : base + size].cast("B"))
            marks.frombytes(slots[base + size : base + 2 * size].cast("B"))
        del ids[length:], marks[length:]
        if marks != array("I", range(1, length + 1)):
            self.num_bad_reads += 1
        return ids, marks
