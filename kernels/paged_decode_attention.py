"""Decode attention over paged KV: one new token a row, GQA, split over the KV length ("flash decoding").

    out[r, h] = softmax(scale * q[r, h] . K[r, g]^T) V[r, g]        g = h // (heads / kv_heads)

Two kernels. The first computes, for each (row, KV head, part of the row's tokens), the partial softmax of all query
heads of the group with the online recurrence, in base 2:

    m' = max(m, max_j s_j)   l' = l 2^(m - m') + sum_j 2^(s_j - m')   a' = a 2^(m - m') + sum_j 2^(s_j - m') v_j

and stores a / l with its weight lse = m + log2 l. The second combines:

    out = sum_p 2^(lse_p - max) a_p / sum_p 2^(lse_p - max)

Decode reads each KV byte once and does little with it, so without the split a long row at a small batch would run
on one multiprocessor only.

References: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023)
and "Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention" (2023).
Twin: `reference.paged_decode_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.kernels.tiling import MIN_DOT, attention_tiling, next_power_of_two, num_splits

LOG2_E = 1.4426950408889634


@triton.jit
def _partial_kernel(
    q_ptr,  # [rows, heads, dim]
    kv_ptr,  # [page, 2, kv_head, slot, dim], a view of one layer
    table_ptr,  # int32 [rows, max_pages]
    lengths_ptr,  # int32 [rows]
    out_ptr,  # [rows, heads, splits, dim]; the final output itself when there is one split
    lse_ptr,  # float32 [rows, heads, splits], contiguous
    scale_log2,  # scale * log2(e)
    q_row_stride,
    q_head_stride,
    q_dim_stride,
    kv_page_stride,
    kv_part_stride,
    kv_head_stride,
    kv_slot_stride,
    kv_dim_stride,
    table_row_stride,
    out_row_stride,
    out_head_stride,
    out_split_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_D >= HEAD_DIM)
    tl.static_assert(BLOCK_G >= GROUP)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    length = tl.load(lengths_ptr + row)
    tiles_a_split = tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS)
    begin = split * tiles_a_split * BLOCK_N
    end = tl.minimum(length, begin + tiles_a_split * BLOCK_N)

    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    held = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = row * q_row_stride + heads[:, None] * q_head_stride + dims[None, :] * q_dim_stride
    q = tl.load(q_ptr + q_offsets, mask=held, other=0.0)

    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    head_ptr = kv_ptr + kv_head * kv_head_stride
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        live = tokens < end
        # int64 before the product: page * stride passes 2^31 on pools that fit one GPU (FIELD-REPORTS F13).
        pages = tl.load(table_ptr + row * table_row_stride + tokens // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        token_offsets = pages * kv_page_stride + (tokens % PAGE_SIZE) * kv_slot_stride
        offsets = token_offsets[:, None] + dims[None, :] * kv_dim_stride
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(head_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(head_ptr + kv_part_stride + offsets, mask=mask, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        # The first token of a tile is always live, so the new maximum is finite and no -inf - -inf arises.
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    # No tokens (padding row, surplus split): zeros, with weight -inf.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = row * out_row_stride + heads[:, None] * out_head_stride + split * out_split_stride + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=held)
    if SPLITS > 1:
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        heads_in_all = tl.num_programs(1) * GROUP
        tl.store(lse_ptr + (row * heads_in_all + heads) * SPLITS + split, lse, mask=group < GROUP)


@triton.jit
def _combine_kernel(
    partial_ptr,  # float32 [rows, heads, splits, dim], contiguous
    lse_ptr,  # float32 [rows, heads, splits], contiguous
    out_ptr,  # [rows, heads, dim], contiguous
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tl.static_assert(BLOCK_D >= HEAD_DIM)
    row_head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, BLOCK_D)

    lse = tl.load(lse_ptr + row_head * SPLITS + splits)
    top = tl.max(lse, 0)
    # A padding row has -inf everywhere; measured from 0 its weights are 0, where -inf - -inf would be NaN.
    weights = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(weights, 0)
    offsets = (row_head * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(partial_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row_head * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_attention(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, scale: float, *, splits: int | None = None
) -> Tensor:
    """As `reference.paged_decode_attention`. `splits`: a power of two, for tests; else chosen by `num_splits`.

    Reads nothing back from the device, so it can be captured in a CUDA graph.
    """
    rows, heads, dim = q.shape
    kv_heads, page_size = kv.shape[2], kv.shape[3]
    assert (heads % kv_heads, kv.shape[4]) == (0, dim), f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}"
    assert page_table.stride(1) == 1, "page table rows must be dense"
    assert lengths.is_contiguous()
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    if not rows:
        return out
    tiling = attention_tiling(dim, q.element_size())
    if splits is None:
        max_tokens = page_table.shape[1] * page_size
        splits = num_splits(rows, kv_heads, max_tokens, tiling.block_n, _processors(q.device))

    partial = out.unsqueeze(2)
    lse = out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    _partial_kernel[(rows, kv_heads, splits)](
        q,
        kv,
        page_table,
        lengths,
        partial,
        lse,
        scale * LOG2_E,
        *q.stride(),
        *kv.stride(),
        page_table.stride(0),
        *partial.stride()[:3],
        PAGE_SIZE=page_size,
        SPLITS=splits,
        num_warps=tiling.num_warps,
        **decode_constants(dim, heads // kv_heads, q.element_size()),
    )
    if splits > 1:
        _combine_kernel[(rows * heads,)](
            partial, lse, out, HEAD_DIM=dim, SPLITS=splits, BLOCK_D=tiling.block_d, num_warps=2
        )
    return out


def decode_constants(head_dim: int, group: int, element_bytes: int) -> dict[str, int]:
    """The compile-time constants of the partial kernel that follow from the model's shape."""
    tiling = attention_tiling(head_dim, element_bytes)
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_G": max(MIN_DOT, next_power_of_two(group)),
        "BLOCK_D": tiling.block_d,
        "BLOCK_N": tiling.block_n,
    }


def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter's host has no such thing and gets a small GPU's number."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
