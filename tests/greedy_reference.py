"""`transformers` as the judge of greedy answers, and clusters that compute with real models.

An answer is judged in one forward pass over prompt and answer: as long as every earlier token was the reference's
own, the logits there are those of its own greedy run.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.cluster_harness import Shape
from tests.routed_cluster import RoutedCluster, routed_cluster
from twostroke.engine.executor import Executor
from twostroke.engine.model.load import load_executor

TRANSPORTS = ("loopback", "grpc", "collective")
NEAR_TIE = 1e-3
"""Batch shapes round differently; a token whose logit is this close to the best one may be chosen instead of it."""

Adjust = Callable[[torch.Tensor, list[int], list[int]], None]
"""Changes the logits `[vocab]` given prompt and output so far."""


@cache
def reference_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def first_gap(model: Any, prompt: Sequence[int], output: Sequence[int], adjust: Adjust | None = None) -> float | None:
    """None when every token is the reference's, else by how much the first other one's logit is under the best."""
    with torch.inference_mode():
        rows = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :].clone()
        for index, token in enumerate(output):
            if adjust is not None:
                adjust(rows[index], list(prompt), list(output[:index]))
            if int(rows[index].argmax()) != token:
                return float(rows[index].max() - rows[index][token])
    return None


def check_greedy(
    directory: Path,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_tokens: int,
    adjust: Adjust | None = None,
    near_tie: float = NEAR_TIE,
) -> list[float]:
    """`answers` are prompts with what the cluster said. Returns the gaps of the near-ties that were accepted."""
    model = reference_model(directory)
    gaps = []
    for prompt, output in answers:
        assert len(output) == num_tokens
        gap = first_gap(model, prompt, output, adjust)
        if gap is not None:
            assert gap < near_tie, f"another token than the reference's, {gap:.2g} under it; prompt of {len(prompt)}"
            gaps.append(gap)
    return gaps


@asynccontextmanager
async def model_cluster(
    directory: Path, shape: Shape, linear: str = "float32", **routing: Any
) -> AsyncIterator[RoutedCluster]:
    """Every slot of the pools holds NaN until it is written, so that reading one too many or too early shows."""

    def make(num_pages: int) -> Executor:
        executor = load_executor(directory, page_size=shape.page_size, num_pages=num_pages, linear=linear)
        executor.pool.tensor.fill_(float("nan"))
        return executor

    async with routed_cluster(shape, make_executor=make, **routing) as routed:
        yield routed


def shape_over(transport: str, **changes: Any) -> Shape:
    links = "direct" if transport == "loopback" else "grpc"
    return Shape(links=links, collective=transport == "collective", **changes)  # type: ignore[arg-type]


def num_preemptions(routed: RoutedCluster) -> float:
    samples = (
        sample for node in routed.cluster.decode for metric in node.registry.collect() for sample in metric.samples
    )
    return sum(sample.value for sample in samples if sample.name == "twostroke_num_preemptions_total")
