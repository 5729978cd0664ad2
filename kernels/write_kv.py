"""Stores new keys and values at their slots of the paged pool.

    kv[slot // page_size, 0, h, slot % page_size] = k[t, h]     and 1 with v, for slot = slots[t];  slot < 0: skipped

One program a token; slots are distinct, so programs never meet. Twin: `reference.write_kv`.
"""

import triton
import triton.language as tl
from torch import Tensor

from twostroke.kernels.tiling import next_power_of_two


@triton.jit
def _write_kernel(
    k_ptr,  # [tokens, kv_heads, dim]
    v_ptr,  # [tokens, kv_heads, dim]
    kv_ptr,  # [page, 2, kv_head, slot, dim], a view of one layer
    slots_ptr,  # int64 [tokens]
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    kv_page_stride,
    kv_part_stride,
    kv_head_stride,
    kv_slot_stride,
    kv_dim_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tl.static_assert(BLOCK >= KV_HEADS * HEAD_DIM)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    mask = element < KV_HEADS * HEAD_DIM
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim * k_dim_stride, mask=mask)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim * v_dim_stride, mask=mask)
    # slot is int64, so the page's offset is too (FIELD-REPORTS F13).
    place = (slot // PAGE_SIZE) * kv_page_stride + (slot % PAGE_SIZE) * kv_slot_stride
    target = kv_ptr + place + head * kv_head_stride + dim * kv_dim_stride
    tl.store(target, k.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(target + kv_part_stride, v.to(kv_ptr.dtype.element_ty), mask=mask)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """As `reference.write_kv`."""
    num_tokens, kv_heads, dim = k.shape
    assert slots.itemsize == 8, "slots are int64"
    assert slots.is_contiguous()
    if not num_tokens:
        return
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv,
        slots,
        *k.stride(),
        *v.stride(),
        *kv.stride(),
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        PAGE_SIZE=kv.shape[3],
        BLOCK=next_power_of_two(kv_heads * dim),
        num_warps=4,
    )
