"""Attention over paged KV on a CPU, compiled by numba: reads pages where they lie, gathers nothing.

    out = softmax(scale * q k^T) v      per row and KV head, over the row's first `lengths` tokens

One work item is a row and a KV head, so that each key and value is loaded once for all query heads of its group
(three on the demo model). Two passes: scores, then weights times values; the scores of one item fit the L1 cache.
Pages lie anywhere in a pool of hundreds of megabytes, and no hardware prefetcher crosses from one to the next: while a
piece (one head's keys or values of a page, 4 KB) is computed on, the code asks for the next one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.cpu_intrinsics import prefetch
from twostroke.kernels.cpu_ops import compiled, flat_view, run_split, softmax

_MIN_ITEM_TOKENS = 512
"""Under this many (item, token) pairs waking another thread takes longer than the work."""


def paged_decode_attention(q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """See `reference.paged_decode_attention`. float32; each page of the layer is dense, the pages may lie apart."""
    q = q.contiguous()
    out = torch.empty_like(q)
    kv_heads, page_size, dim = kv.shape[2:]
    arguments: tuple[Any, ...] = (
        q.numpy(),
        flat_view(kv),
        kv.stride(0),
        page_size,
        page_table.contiguous().numpy(),
        lengths.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    items = q.shape[0] * kv_heads
    threads = min(torch.get_num_threads(), items)
    if threads > 1 and int(lengths.sum()) * kv_heads < _MIN_ITEM_TOKENS * threads:
        threads = 1
    run_split(_decode_kernel(dim, q.shape[1] // kv_heads), arguments, items, threads)
    return out


def ragged_prefill_attention(
    q: Tensor, kv: Tensor, page_table: Tensor, query_starts: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """See `reference.ragged_prefill_attention`. A sequence at a time through torch's fused attention.

    Gathering a sequence's pages costs what one decode step pays for reading them; its queries repay it.
    """
    page_size = kv.shape[3]
    out = torch.empty_like(q)
    starts = query_starts.tolist()
    for seq, length in enumerate(lengths.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        num_new = end - begin
        pages = kv.index_select(0, page_table[seq, : -(-length // page_size)])
        k, v = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :length]
        mask = None
        if 1 < num_new < length:
            visible = torch.arange(length - num_new, length)[:, None]
            mask = torch.arange(length) <= visible
        attended = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            k,
            v,
            attn_mask=mask,
            is_causal=1 < num_new == length,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


@compiled
def _prefetch_row(flat: Any, start: int, size: int) -> None:
    for i in range(0, size, 16):
        prefetch(flat, start + i)


@cache
def _decode_kernel(dim: int, group: int) -> Callable[..., None]:
    """Compiled for one head_dim and number of query heads a KV head: constant bounds unroll the inner loops.

    The closure holds nothing but these two integers: numba names a cached closure by the pickled values it closes
    over, and a compiled function among them would pickle differently in each process.
    """

    @compiled
    def decode_items(
        q: Any,
        flat: Any,
        stride: int,
        page_size: int,
        page_table: Any,
        lengths: Any,
        scale: Any,
        out: Any,
        begin: int,
        end: int,
    ) -> None:
        """q, out [rows, heads, dim]; page p's keys start at flat[p * stride]; items of rows x kv_heads."""
        kv_heads = q.shape[1] // group
        piece = page_size * dim
        longest = 1
        for row in range(lengths.shape[0]):
            longest = max(longest, lengths[row])
        scores = np.empty((group, longest), dtype=np.float32)
        powers = np.empty(longest, dtype=np.int32)
        queries = np.empty((group, dim), dtype=np.float32)
        result = np.empty((group, dim), dtype=np.float32)
        for item in range(begin, end):
            row, head = item // kv_heads, item % kv_heads
            length: Any = np.int64(lengths[row])
            num_pages = (length + page_size - 1) // page_size
            for member in range(group):
                for i in range(dim):
                    queries[member, i] = q[row, head * group + member, i] * scale
                    result[member, i] = 0.0
            # 1. Scores, four keys at a time: as many sums under way as hide an FMA's latency.
            for page in range(num_pages):
                start = page * page_size
                used: Any = min(page_size, length - start)
                base = np.int64(page_table[row, page]) * stride + head * piece
                following = np.int64(page_table[row, (page + 1) % num_pages]) * stride + head * piece
                if page == num_pages - 1:
                    following += kv_heads * piece
                keys = flat[base : base + used * dim].reshape(used, dim)
                for slot in range(0, used - 3, 4):
                    _prefetch_row(flat, following + slot * dim, 4 * dim)
                    for member in range(group):
                        sum_a = sum_b = sum_c = sum_d = np.float32(0.0)
                        for i in range(dim):
                            x = queries[member, i]
                            sum_a += x * keys[slot, i]
                            sum_b += x * keys[slot + 1, i]
                            sum_c += x * keys[slot + 2, i]
                            sum_d += x * keys[slot + 3, i]
                        scores[member, start + slot] = sum_a
                        scores[member, start + slot + 1] = sum_b
                        scores[member, start + slot + 2] = sum_c
                        scores[member, start + slot + 3] = sum_d
                for slot in range(used - used % 4, used):
                    for member in range(group):
                        total = np.float32(0.0)
                        for i in range(dim):
                            total += queries[member, i] * keys[slot, i]
                        scores[member, start + slot] = total
            if length:
                for member in range(group):
                    softmax(scores[member], powers, length)
            # 2. Values, four at a time, so that `result` is loaded and stored a quarter as often.
            for page in range(num_pages):
                start = page * page_size
                used = min(page_size, length - start)
                offset = (kv_heads + head) * piece
                base = np.int64(page_table[row, page]) * stride + offset
                following = np.int64(page_table[row, (page + 1) % num_pages]) * stride + offset
                values = flat[base : base + used * dim].reshape(used, dim)
                for slot in range(0, used - 3, 4):
                    _prefetch_row(flat, following + slot * dim, 4 * dim)
                    for member in range(group):
                        of_a, of_b = scores[member, start + slot], scores[member, start + slot + 1]
                        of_c, of_d = scores[member, start + slot + 2], scores[member, start + slot + 3]
                        for i in range(dim):
                            result[member, i] += (
                                of_a * values[slot, i]
                                + of_b * values[slot + 1, i]
                                + of_c * values[slot + 2, i]
                                + of_d * values[slot + 3, i]
                            )
                for slot in range(used - used % 4, used):
                    for member in range(group):
                        weight = scores[member, start + slot]
                        for i in range(dim):
                            result[member, i] += weight * values[slot, i]
            for member in range(group):
                for i in range(dim):
                    out[row, head * group + member, i] = result[member, i]

    kernel: Callable[..., None] = decode_items
    return kernel
