"""Linear layers: plain, or with weights packed as float16 for FBGEMM (docs/adr/0006-cpu-linears.md).

Fused projections (q, k, v and gate, up) are one matrix: fewer calls, and the activations are read once.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [tokens, in] -> [tokens, out]."""


def fp16_packing_supported() -> bool:
    """True where torch was built with FBGEMM and the CPU has AVX2; elsewhere the packed ops raise."""
    return "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.cpu.get_cpu_capability() in (
        "AVX2",
        "AVX512",
    )


def dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    def apply(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return apply


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Weights in float16 (values beyond its range saturate), activations and sums in float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def apply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed)
        return result

    return apply


def fused(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights or biases of projections of one input, stacked along the output."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=0)
