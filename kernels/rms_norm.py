"""Root-mean-square norm over the last axis.

    y = round(x / sqrt(mean(x^2) + eps)) * weight

in float32 up to the rounding to x's dtype, which comes before the weight, as in Llama. One program a row; rows may
be strided (a slice of a fused QKV projection), so per-head norms need no copy.

Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Twin: `reference.rms_norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.kernels.tiling import next_power_of_two


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [outer, inner, dim]
    weight_ptr,  # [dim], contiguous
    out_ptr,  # [outer, inner, dim], contiguous
    x_outer_stride,
    x_inner_stride,
    x_dim_stride,
    inner,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tl.static_assert(BLOCK >= DIM)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < DIM
    x_row = x_ptr + (row // inner) * x_outer_stride + (row % inner) * x_inner_stride
    x = tl.load(x_row + dims * x_dim_stride, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, 0) / DIM
    normed = (x / tl.sqrt(mean_square + eps)).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * DIM + dims, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`; x `[..., dim]`, weight `[dim]` of the same dtype."""
    dim = x.shape[-1]
    assert (weight.shape, weight.dtype) == ((dim,), x.dtype)
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows = x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, *x.shape[-2:])
    outer, inner, _ = rows.shape
    block = next_power_of_two(dim)
    _rms_norm_kernel[(outer * inner,)](
        rows, weight, out, *rows.stride(), inner, eps, DIM=dim, BLOCK=block, num_warps=min(8, max(1, block // 256))
    )
    return out
