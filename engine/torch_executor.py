"""The executor that computes: a decoder over a page pool, on a CPU or a CUDA device.

    launch   begins the masks of rows with a grammar, on threads of their own; builds the batch and, on CUDA, queues the
             forward pass, which runs while the engine flushes its outbox
    result   on a CPU runs the forward pass; masks and samples; returns host tokens

A failure of either is raised by `result`, so that the loop has one place to end the step's jobs.
"""

from typing import Protocol

import torch

from twostroke.cluster.core.ids import JobId
from twostroke.cluster.core.layout import PageMemory
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.engine.batch import Batch, build_batch
from twostroke.engine.logprobs import pick, raw_logprobs
from twostroke.engine.masks import NO_MASKS, MaskPool, StepMasks
from twostroke.engine.page_pool import PagePool
from twostroke.engine.plan import Plan, SampleInput, ScoreInput, StepResult
from twostroke.engine.sampler import apply_masks, sample


class Forward(Protocol):
    """A loaded model, in whatever form."""

    @property
    def weight_bytes(self) -> int:
        """As `Executor.weight_bytes`."""
        ...

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' k and v into `pool`; return float32 logits `[sampled, vocab]`."""
        ...


class TorchExecutor:
    """Used by the engine thread alone, apart from `memory`, which the transports share."""

    def __init__(self, decoder: Forward, pool: PagePool, vocab_size: int, max_positions: int, threads: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._threads = threads
        self._masks = MaskPool()

    @property
    def memory(self) -> PageMemory:
        return self._pool

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int:
        return self._max_positions

    def launch(self, plan: Plan) -> "TorchStep":
        step = TorchStep(self, plan, self._masks.start(plan))
        if self._pool.tensor.device.type == "cuda":
            step.start()
        return step

    def forward(self, plan: Plan) -> tuple[Batch, torch.Tensor]:
        """The batch of `plan` and its logits float32 `[sampled rows, vocab]`, still on the device."""
        if torch.get_num_threads() != self._threads:
            # Per thread, and the engine thread is not the one that built us.
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            batch = build_batch(plan, self._pool.layout.page_size, self._pool.tensor.device)
            return batch, self._decoder.forward(batch, self._pool.tensor)


class TorchStep:
    def __init__(self, executor: TorchExecutor, plan: Plan, masks: StepMasks | None) -> None:
        self._executor = executor
        self._plan = plan
        self._masks = masks
        self._started: tuple[Batch, torch.Tensor] | Exception | None = None

    def start(self) -> None:
        try:
            self._started = self._executor.forward(self._plan)
        except Exception as error:  # raised by `result`, as the interface says
            self._started = error

    def result(self) -> StepResult:
        if self._started is None:
            self.start()
        started = self._started
        if isinstance(started, Exception):
            raise started
        assert started is not None
        batch, logits = started
        plan = self._plan
        tokens: list[int | None] = [None] * plan.num_rows
        scores = {
            plan.jobs[row]: _score(logits[at : at + len(plan.score[row].targets)], plan.score[row])
            for row, at in batch.scored_at.items()
        }
        logprobs: dict[JobId, TokenLogprob] = {}
        masks = NO_MASKS if self._masks is None else self._masks.wait()
        if batch.sampled_rows:
            inputs = [item for item in plan.sample if item is not None]
            with torch.inference_mode():
                if batch.sampled_at is not None:
                    logits = logits[batch.sampled_at]
                told = [index for index, item in enumerate(inputs) if item.params.logprobs is not None]
                raw = raw_logprobs(logits[told]) if told else None
                if masks.bits:
                    places = {row: index for index, row in enumerate(batch.sampled_rows)}
                    apply_masks(logits, {places[row]: bits for row, bits in masks.bits.items()})
                sampled = sample(logits, inputs)
                if raw is not None:
                    picked = pick(raw, [sampled[index] for index in told], [_top(inputs[index]) for index in told])
                    logprobs = {
                        plan.jobs[batch.sampled_rows[index]]: value for index, value in zip(told, picked, strict=True)
                    }
            for row, token in zip(batch.sampled_rows, sampled, strict=True):
                tokens[row] = token
        for row in (*masks.broken, *masks.late):
            tokens[row] = None
        return StepResult(tokens, masks.broken, masks.late, logprobs, scores)


def _top(item: SampleInput) -> int:
    return item.params.logprobs or 0


def _score(logits: torch.Tensor, item: ScoreInput) -> tuple[TokenLogprob, ...]:
    """Of a scored row's logits `[targets, vocab]`, before sampling changes them."""
    with torch.inference_mode():
        return tuple(pick(raw_logprobs(logits), item.targets, [item.top] * len(item.targets)))
