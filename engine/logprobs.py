"""Log-probabilities of a step's tokens, from logits that nothing has changed yet. See `cluster.core.logprobs`."""

from collections.abc import Sequence

import torch

from twostroke.cluster.core.logprobs import LOWEST, TokenLogprob


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """log_softmax of `[rows, vocab]` in float32, in memory of its own."""
    return torch.log_softmax(logits.float(), dim=-1).clamp_(min=LOWEST)


def pick(logprobs: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """One token a row of `raw_logprobs`, each with as many alternatives as its `tops`; equal ones by their ids."""
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1).add_(1).tolist()
    width = min(max(tops), logprobs.shape[1])
    best = logprobs.topk(width, dim=-1)
    rows = zip(chosen[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), tops, strict=True)
    picked: list[TokenLogprob] = []
    for value, rank, ids, values, top in rows:
        order = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        picked.append(
            TokenLogprob(value, rank, tuple(token for _, token in order), tuple(logprob for logprob, _ in order))
        )
    return picked
