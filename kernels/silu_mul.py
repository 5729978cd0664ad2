"""The gate of a SwiGLU feed-forward block.

    out[t, i] = silu(x[t, i]) * x[t, inter + i],      silu(a) = a / (1 + e^-a)

in float32, rounded once. Grid (token, part of the row).

Reference: Shazeer, "GLU Variants Improve Transformer" (2020). Twin: `reference.silu_mul`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements a program computes."""


@triton.jit
def _silu_mul_kernel(
    x_ptr,  # [tokens, 2 * inter], rows dense
    out_ptr,  # [tokens, inter], contiguous
    x_token_stride,
    inter,
    BLOCK: tl.constexpr,
):
    tl.static_assert(BLOCK % 128 == 0)
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < inter
    row = x_ptr + token * x_token_stride
    gate = tl.load(row + element, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + inter + element, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * inter + element, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`; rows dense."""
    num_tokens, width = gate_up.shape
    assert (width % 2, gate_up.stride(1)) == (0, 1)
    out = torch.empty((num_tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width // 2, BLOCK))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width // 2, BLOCK=BLOCK, num_warps=4)
    return out
