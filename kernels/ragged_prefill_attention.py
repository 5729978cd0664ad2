"""Prefill attention: each sequence's new tokens, back to back, over its paged prefix and (causally) themselves.

    out[t, h] = softmax(scale * q[t, h] . K[s, g, :p + 1]^T) V[s, g, :p + 1]
    s the sequence of t,  g = h // (heads / kv_heads),  p = lengths[s] - new tokens of s + (t - query_starts[s])

One program computes BLOCK_Q tokens of one sequence for all query heads of one KV head: its tile has a row for
each (token, head of the group), so keys and values are read once a group:

    tile row m  ->  token m // GROUP, head kv_head * GROUP + m % GROUP      (rows past BLOCK_Q * GROUP idle)

Sequences are ragged and their bounds live on the device. Sequence s owns blocks from
`query_starts[s] // BLOCK_Q + s` on: at least as many as it needs, and the grid of `tokens // BLOCK_Q + seqs` holds
them all, so the host needs no bounds. A program finds its sequence by bisection; one past its sequence's end returns.

References: Dao, "FlashAttention-2" (2023); the bisection over query starts is as in vLLM's unified Triton attention.
Twin: `reference.ragged_prefill_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.kernels.tiling import attention_tiling, next_power_of_two

LOG2_E = 1.4426950408889634
TILE_ROWS = 64


@triton.jit
def _prefill_kernel(
    q_ptr,  # [tokens, heads, dim]
    kv_ptr,  # [page, 2, kv_head, slot, dim], a view of one layer
    table_ptr,  # int32 [seqs, max_pages]
    starts_ptr,  # int32 [seqs + 1]
    lengths_ptr,  # int32 [seqs]
    out_ptr,  # [tokens, heads, dim], contiguous
    scale_log2,  # scale * log2(e)
    num_seqs,
    q_token_stride,
    q_head_stride,
    q_dim_stride,
    kv_page_stride,
    kv_part_stride,
    kv_head_stride,
    kv_slot_stride,
    kv_dim_stride,
    table_row_stride,
    out_token_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.static_assert(BLOCK_D >= HEAD_DIM)
    tl.static_assert(BLOCK_M >= BLOCK_Q * GROUP)
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)

    # The last sequence whose first block is at or before ours.
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    seq = low
    seq_start = tl.load(starts_ptr + seq)
    num_new = tl.load(starts_ptr + seq + 1) - seq_start
    first = (block - (seq_start // BLOCK_Q + seq)) * BLOCK_Q
    if first >= num_new:
        return
    prefix = tl.load(lengths_ptr + seq) - num_new

    tile_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    new_tokens = first + tile_rows // GROUP
    heads = kv_head * GROUP + tile_rows % GROUP
    busy = (tile_rows < BLOCK_Q * GROUP) & (new_tokens < num_new)
    held = busy[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (seq_start + new_tokens).to(tl.int64)
    q_offsets = q_rows[:, None] * q_token_stride + heads[:, None] * q_head_stride + dims[None, :] * q_dim_stride
    q = tl.load(q_ptr + q_offsets, mask=held, other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    positions = prefix + new_tokens
    end = prefix + tl.minimum(first + BLOCK_Q, num_new)
    head_ptr = kv_ptr + kv_head * kv_head_stride
    table_row = table_ptr + tl.cast(seq, tl.int64) * table_row_stride
    for start in range(0, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        live = tokens < end
        # int64 before the product: page * stride passes 2^31 on pools that fit one GPU (FIELD-REPORTS F13).
        pages = tl.load(table_row + tokens // PAGE_SIZE, mask=live, other=0).to(tl.int64)
        token_offsets = pages * kv_page_stride + (tokens % PAGE_SIZE) * kv_slot_stride
        offsets = token_offsets[:, None] + dims[None, :] * kv_dim_stride
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(head_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(head_ptr + kv_part_stride + offsets, mask=mask, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :] & (tokens[None, :] <= positions[:, None]), scores, float("-inf"))
        # Token 0 is visible to every row, so from the first tile on the maximum is finite: no -inf - -inf.
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    out_offsets = q_rows[:, None] * out_token_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=held)


def ragged_prefill_attention(
    q: Tensor, kv: Tensor, page_table: Tensor, query_starts: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """As `reference.ragged_prefill_attention`. Reads nothing back from the device."""
    num_tokens, heads, dim = q.shape
    kv_heads, page_size = kv.shape[2], kv.shape[3]
    num_seqs = lengths.shape[0]
    assert (heads % kv_heads, kv.shape[4]) == (0, dim), f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}"
    assert query_starts.shape[0] == num_seqs + 1, "query_starts needs one entry more than there are sequences"
    assert page_table.stride(1) == 1, "page table rows must be dense"
    assert lengths.is_contiguous()
    assert query_starts.is_contiguous()
    out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    constants = prefill_constants(dim, heads // kv_heads, q.element_size())
    _prefill_kernel[(num_tokens // constants["BLOCK_Q"] + num_seqs, kv_heads)](
        q,
        kv,
        page_table,
        query_starts,
        lengths,
        out,
        scale * LOG2_E,
        num_seqs,
        *q.stride(),
        *kv.stride(),
        page_table.stride(0),
        out.stride(0),
        PAGE_SIZE=page_size,
        num_warps=attention_tiling(dim, q.element_size()).num_warps,
        **constants,
    )
    return out


def prefill_constants(head_dim: int, group: int, element_bytes: int) -> dict[str, int]:
    """The compile-time constants of the kernel that follow from the model's shape."""
    tiling = attention_tiling(head_dim, element_bytes)
    # Wide elements and wide heads get half the rows, so that queries, keys, values and weights fit shared memory.
    tile_rows = TILE_ROWS if tiling.block_d * element_bytes <= 256 else TILE_ROWS // 2
    block_m = max(tile_rows, next_power_of_two(group))
    return {
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "BLOCK_Q": block_m // group,
        "BLOCK_M": block_m,
        "BLOCK_D": tiling.block_d,
        "BLOCK_N": tiling.block_n,
    }
