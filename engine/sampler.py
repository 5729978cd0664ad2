"""From logits to tokens, all rows of a step together.

    greedy rows     smallest id among the largest logits: one argmax over all of them, nothing else
    plain rows      temperature only: float64 weights, running sum, one search; no sort
    filtered rows   top_k, then top_p of what is left, then min_p relative to the largest; drawn the same way

Before that, rows that ask for it have their bias added, then penalties applied and, below `min_tokens`, their ends
masked.

The draw is an inverse CDF over the kept tokens in id order at `uniform(seed, output index)`: a token depends on its
own request's seed and position, not on the batch, the worker or the attempt (FIELD-REPORTS E28).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import numpy as np
import torch

from twostroke.cluster.core.errors import InternalError
from twostroke.cluster.core.random import uniform
from twostroke.engine.plan import SampleInput


def sample(logits: torch.Tensor, inputs: list[SampleInput]) -> list[int]:
    """One token a row of `logits` float32 `[rows, vocab]`, which is changed in place.

    Raises InternalError for a row without a finite largest logit: NaN would silently become a token.
    """
    for row, item in enumerate(inputs):
        _penalize(logits[row], item)
    largest, greedy = logits.max(dim=-1)
    finite = torch.isfinite(largest)
    tokens = torch.where(finite, greedy, -1).tolist()
    if -1 in tokens:
        raise InternalError(f"logits of row {tokens.index(-1)} are not finite")
    drawn = [row for row, item in enumerate(inputs) if item.params.temperature > 0]
    if drawn:
        ids = _draw(logits[drawn], [inputs[row] for row in drawn])
        for row, token in zip(drawn, ids, strict=True):
            tokens[row] = token
    return [int(token) for token in tokens]


def apply_masks(logits: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    """Rule out in place, in rows of `logits` `[rows, vocab]`, every token whose bit is not set (lowest bit of a byte
    first). Masks have the same length, at least a bit for every token.
    """
    if not masks:
        return
    packed = ~np.frombuffer(b"".join(masks.values()), dtype=np.uint8).reshape(len(masks), -1)
    # numpy unpacks the bits ten times as fast as any way torch has: a tenth of a millisecond a row.
    flags = np.unpackbits(packed, axis=1, count=logits.shape[-1], bitorder="little")
    barred = torch.from_numpy(flags).view(torch.bool).to(logits.device)
    for index, row in enumerate(masks):
        logits[row].masked_fill_(barred[index], float("-inf"))


def _penalize(logits: torch.Tensor, item: SampleInput) -> None:
    """Change one row `[vocab]` in place. Repetition counts prompt and output; the other two output alone (E29)."""
    params = item.params
    if params.logit_bias:
        biases = dict(params.logit_bias)
        biased = _ids(biases.keys(), logits)
        logits[biased] += torch.tensor([biases[token] for token in biased.tolist()], device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = _ids({*item.prompt, *item.output}, logits)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if item.output and (params.presence_penalty or params.frequency_penalty):
        output, counts = torch.unique(torch.tensor(item.output), return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts.to(torch.float32)
        logits[output.to(logits.device)] -= penalties.to(logits.device)
    if len(item.output) < params.min_tokens and params.ends:
        logits[_ids(params.ends, logits)] = float("-inf")


def _ids(tokens: AbstractSet[int], logits: torch.Tensor) -> torch.Tensor:
    """Ids within the vocabulary: an end may be one that this model's head does not have."""
    return torch.tensor(sorted(token for token in tokens if token < logits.shape[-1]), device=logits.device)


def _draw(logits: torch.Tensor, inputs: list[SampleInput]) -> list[int]:
    """`logits` is a copy `[rows, vocab]`; every row has a temperature."""
    device = logits.device
    temperatures = torch.tensor([item.params.temperature for item in inputs], dtype=torch.float64, device=device)
    wide = logits.double()
    weights = ((wide - wide.amax(dim=-1, keepdim=True)) / temperatures[:, None]).exp_()
    for row, item in enumerate(inputs):
        params = item.params
        if params.top_k > 0 or params.top_p < 1.0:
            weights[row] *= _kept(weights[row], params.top_k, params.top_p)
        if params.min_p > 0:
            # The largest weight is exp(0) = 1, so a probability relative to it is the weight itself.
            weights[row] *= weights[row] >= params.min_p
    sums = weights.cumsum(dim=-1)
    draws = [uniform(item.params.seed, len(item.output)) for item in inputs]
    targets = torch.tensor(draws, dtype=torch.float64, device=device) * sums[:, -1]
    # Rounding may lift u * total to the total itself, behind which no token lies.
    targets = torch.minimum(targets, torch.nextafter(sums[:, -1], torch.zeros_like(targets)))
    found: list[int] = torch.searchsorted(sums, targets[:, None], right=True)[:, 0].tolist()
    return found


def _kept(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Mask `[vocab]` of the `top_k` heaviest, and of these the fewest that hold `top_p` of their sum.

    Among equal weights smaller ids go first. The candidates are found without sorting the vocabulary when few
    tokens hold the mass, which is the usual case.
    """
    vocab = weights.shape[0]
    limit = min(top_k, vocab) if top_k > 0 else vocab
    size = min(vocab, max(1024, limit if top_k > 0 else 0))
    total = weights.sum()
    while True:
        threshold = weights.topk(size, sorted=False).values.min()
        candidates = torch.nonzero(weights >= threshold)[:, 0]
        order = torch.argsort(weights[candidates], descending=True, stable=True)
        candidates = candidates[order][:limit]
        running = weights[candidates].cumsum(dim=0)
        mass = running[-1] if top_k > 0 else total
        if size == vocab or top_k > 0 or bool(running[-1] >= top_p * mass):
            break
        size = min(vocab, size * 8)
    kept = torch.zeros_like(weights)
    # A token stays while those before it hold less than top_p; so the first always does.
    before = torch.cat((running.new_zeros(1), running[:-1]))
    kept[candidates[before < top_p * mass]] = 1.0
    kept[candidates[0]] = 1.0
    return kept
