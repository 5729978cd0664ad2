"""Linear layers as weights, and as what torch computes with them.

Fused projections (q, k, v and gate, up) are one matrix: fewer calls, and the activations are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Matrix:
    """Projections of one input: weights `[out, in]` and biases `[out]`, or none."""

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor] = ()

    @property
    def weight(self) -> torch.Tensor:
        return _stacked(self.weights)

    @property
    def bias(self) -> torch.Tensor | None:
        return _stacked(self.biases) if self.biases else None


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=0)


class Linear:
    """x `[tokens, in]` -> `[tokens, out]`, as torch computes it."""

    def __init__(self, matrix: Matrix) -> None:
        self._weight, self._bias = matrix.weight, matrix.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """A tied head's is the embedding itself."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]
