"""Attention over paged KV on a CPU, compiled by numba: reads pages where they lie, gathers nothing.

    out = softmax(scale * q k^T) v      per row and KV head, over the row's first `lengths` tokens

One work item is a row and a KV head, so that each key and value is loaded once for all query heads of its group
(three on the demo model). Two passes: scores, then weights times values; the scores of one item fit the L1 cache.
Compiled code releases the GIL and is cached beside this file (or in NUMBA_CACHE_DIR). Work is cut by hand over a
small pool of threads, not by numba's own layers: one of those ends the process when two engine threads enter it at
once, the other is a second OpenMP runtime that spins against torch's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.cpu_ops import compiled, exponentials, flat_view

_MIN_ITEM_TOKENS = 512
"""Under this many (item, token) pairs waking another thread takes longer than the work."""


def paged_decode_attention(q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """See `reference.paged_decode_attention`. float32; each page of the layer is dense, the pages may lie apart."""
    q = q.contiguous()
    out = torch.empty_like(q)
    flat = flat_view(kv)
    shape = np.array(kv.shape[2:], dtype=np.int64)
    arguments: tuple[Any, ...] = (
        q.numpy(),
        flat,
        kv.stride(0),
        shape,
        page_table.contiguous().numpy(),
        lengths.numpy(),
        np.float32(scale),
        out.numpy(),
    )
    items = q.shape[0] * kv.shape[2]
    threads = min(torch.get_num_threads(), items)
    if threads == 1 or int(lengths.sum()) * kv.shape[2] < _MIN_ITEM_TOKENS * threads:
        _decode_items(*arguments, 0, items)
        return out
    cuts = [items * part // threads for part in range(threads + 1)]
    work: Callable[..., None] = _decode_items
    helpers = [_pool(threads - 1).submit(work, *arguments, cuts[part], cuts[part + 1]) for part in range(1, threads)]
    _decode_items(*arguments, 0, cuts[1])
    for helper in helpers:
        helper.result()
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


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")


@compiled
def _decode_items(
    q: Any,
    flat: Any,
    stride: int,
    shape: Any,
    page_table: Any,
    lengths: Any,
    scale: Any,
    out: Any,
    begin: int,
    end: int,
) -> None:
    """q, out [rows, heads, dim]; page p's keys start at flat[p * stride]; items begin .. end - 1 of rows x kv_heads."""
    kv_heads, page_size, dim = shape[0], shape[1], shape[2]
    values_offset = kv_heads * page_size * dim
    group = q.shape[1] // kv_heads
    longest = 1
    for row in range(lengths.shape[0]):
        longest = max(longest, lengths[row])
    scores = np.empty((group, longest), dtype=np.float32)
    powers = np.empty(longest, dtype=np.int32)
    for item in range(begin, end):
        row, head = item // kv_heads, item % kv_heads
        length = np.int64(lengths[row])
        first = head * group
        for start in range(0, length, page_size):
            base = np.int64(page_table[row, start // page_size]) * stride + head * page_size * dim
            used = min(page_size, length - start)
            for member in range(group):
                _page_scores(q[row, first + member], flat, base, used, scale, scores[member, start : start + used])
        for member in range(group):
            _softmax(scores[member], powers, length)
            for i in range(dim):
                out[row, first + member, i] = 0.0
        for start in range(0, length, page_size):
            base = np.int64(page_table[row, start // page_size]) * stride + head * page_size * dim + values_offset
            used = min(page_size, length - start)
            for member in range(group):
                _page_values(scores[member, start : start + used], flat, base, used, out[row, first + member])


@compiled
def _page_scores(query: Any, flat: Any, base: int, used: int, scale: Any, scores: Any) -> None:
    """Four keys at a time: as many sums under way as hide an FMA's latency, and the query is loaded once for them."""
    dim = query.shape[0]
    for slot in range(0, used - 3, 4):
        key = base + slot * dim
        a, b = flat[key : key + dim], flat[key + dim : key + 2 * dim]
        c, d = flat[key + 2 * dim : key + 3 * dim], flat[key + 3 * dim : key + 4 * dim]
        sum_a = sum_b = sum_c = sum_d = np.float32(0.0)
        for i in range(dim):
            x = query[i]
            sum_a += x * a[i]
            sum_b += x * b[i]
            sum_c += x * c[i]
            sum_d += x * d[i]
        scores[slot] = sum_a * scale
        scores[slot + 1] = sum_b * scale
        scores[slot + 2] = sum_c * scale
        scores[slot + 3] = sum_d * scale
    for slot in range(used - used % 4, used):
        a = flat[base + slot * dim : base + (slot + 1) * dim]
        total = np.float32(0.0)
        for i in range(dim):
            total += query[i] * a[i]
        scores[slot] = total * scale


@compiled
def _page_values(weights: Any, flat: Any, base: int, used: int, result: Any) -> None:
    """Four values at a time, so that `result` is loaded and stored a quarter as often."""
    dim = result.shape[0]
    for slot in range(0, used - 3, 4):
        value = base + slot * dim
        a, b = flat[value : value + dim], flat[value + dim : value + 2 * dim]
        c, d = flat[value + 2 * dim : value + 3 * dim], flat[value + 3 * dim : value + 4 * dim]
        of_a, of_b, of_c, of_d = weights[slot], weights[slot + 1], weights[slot + 2], weights[slot + 3]
        for i in range(dim):
            result[i] += of_a * a[i] + of_b * b[i] + of_c * c[i] + of_d * d[i]
    for slot in range(used - used % 4, used):
        a = flat[base + slot * dim : base + (slot + 1) * dim]
        weight = weights[slot]
        for i in range(dim):
            result[i] += weight * a[i]


@compiled
def _softmax(scores: Any, powers: Any, length: int) -> None:
    """In place over the first `length` scores; `powers` is scratch."""
    largest = scores[0]
    for i in range(1, length):
        largest = max(largest, scores[i])
    for i in range(length):
        scores[i] -= largest
    exponentials(scores, powers, length)
    total = np.float32(0.0)
    for i in range(length):
        total += scores[i]
    inverse = np.float32(1.0) / total
    for i in range(length):
        scores[i] *= inverse
