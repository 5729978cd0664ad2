"""Rotary position embedding, "rotate half" pairing: element i turns with element i + dim/2.

    out[i]         = x[i] cos[i]         - x[i + dim/2] sin[i]
    out[i + dim/2] = x[i + dim/2] cos[i] + x[i] sin[i]                 i < dim/2

cos and sin hold each angle twice (their halves are equal), so only the first half is read. One program a token turns
all heads of q and k, in float32.

Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). Twin: `reference.rope`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.kernels.tiling import next_power_of_two


@triton.jit
def _turn(
    x_ptr,  # one token: [HEADS, 2 * HALF]
    out_ptr,  # one token, contiguous: [HEADS, 2 * HALF]
    dim_stride,
    head_stride,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    source = x_ptr + heads * head_stride + dims * dim_stride
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF * dim_stride, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + heads * (2 * HALF) + dims
    tl.store(target, (low * cos - high * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (high * cos + low * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,  # [tokens, heads, dim]
    k_ptr,  # [tokens, kv_heads, dim]
    cos_ptr,  # [tokens, dim]
    sin_ptr,  # [tokens, dim]
    q_out_ptr,  # [tokens, heads, dim], contiguous
    k_out_ptr,  # [tokens, kv_heads, dim], contiguous
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    cos_token_stride,
    sin_token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tl.static_assert(BLOCK_H >= HEADS)
    tl.static_assert(BLOCK_KV_H >= KV_HEADS)
    tl.static_assert(BLOCK_D >= HALF)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(cos_ptr + token * cos_token_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_token_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    q = q_ptr + token * q_token_stride
    k = k_ptr + token * k_token_stride
    q_out = q_out_ptr + token * HEADS * HALF * 2
    k_out = k_out_ptr + token * KV_HEADS * HALF * 2
    _turn(q, q_out, q_dim_stride, q_head_stride, cos, sin, HEADS, HALF, BLOCK_H, BLOCK_D)
    _turn(k, k_out, k_dim_stride, k_head_stride, cos, sin, KV_HEADS, HALF, BLOCK_KV_H, BLOCK_D)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.rope`; dim even, rows of cos and sin dense."""
    num_tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert (dim % 2, k.shape[2]) == (0, dim)
    assert (cos.stride(-1), sin.stride(-1)) == (1, 1)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not num_tokens:
        return q_out, k_out
    _rope_kernel[(num_tokens,)](
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        *q.stride(),
        *k.stride(),
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK_H=next_power_of_two(heads),
        BLOCK_KV_H=next_power_of_two(kv_heads),
        BLOCK_D=next_power_of_two(dim // 2),
        num_warps=4,
    )
    return q_out, k_out
