"""The plain torch twin of every op: the definition that the fast kernels are held to.

Written for reading, in float32 arithmetic whatever the inputs' dtype, on any device. No function writes to its inputs,
apart from those whose purpose it is (`write_kv` and `rotate_and_write` into `kv`, `add_rms_norm` into `x`,
`scatter_pages` into `pool`).

`kv` is one layer of the page pool, usually a non-contiguous view: `[page, 2, kv_head, slot, head_dim]`, index 0 of
the second axis holding keys and index 1 values. Token t of a sequence lives in page `page_table[t // page_size]`,
slot `t % page_size`. Entries of a page table beyond a sequence's length, and slots beyond it, are never read: they
may hold anything, NaN included.
"""

import torch
from torch import Tensor


def paged_decode_attention(q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v of one new token a row over the row's first `lengths` tokens.

    q `[rows, heads, dim]`, page_table int32 `[rows, max_pages]`, lengths int32 `[rows]` (a row of length 0 is
    padding: zeros). Query head h reads KV head h // (heads / kv_heads). Returns `[rows, heads, dim]` like q.
    """
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        if length:
            k, v = _sequence(kv, page_table[row], length)
            out[row] = _attend(q[row].unsqueeze(0), k, v, scale, first_position=length - 1)[0].to(q.dtype)
    return out


def ragged_prefill_attention(
    q: Tensor, kv: Tensor, page_table: Tensor, query_starts: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Causal attention of each sequence's new tokens over its cached prefix and themselves.

    q `[tokens, heads, dim]` holds the new tokens of all sequences back to back; sequence s owns rows
    `query_starts[s] .. query_starts[s + 1] - 1` (int32 `[seqs + 1]`). lengths int32 `[seqs]` counts KV tokens
    *including* the new ones, whose keys and values are already written. Returns `[tokens, heads, dim]` like q.
    """
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for seq, length in enumerate(lengths.tolist()):
        first, end = starts[seq], starts[seq + 1]
        if first < end:
            k, v = _sequence(kv, page_table[seq], length)
            position = length - (end - first)
            out[first:end] = _attend(q[first:end], k, v, scale, first_position=position).to(q.dtype)
    return out


def _sequence(kv: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Gather one sequence's keys and values, each float32 `[kv_head, length, dim]`."""
    page_size = kv.shape[3]
    used = pages[: -(-length // page_size)].long()
    gathered = kv[used].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return gathered[0], gathered[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first_position: int) -> Tensor:
    """q `[tokens, heads, dim]` at positions from `first_position` on; k, v `[kv_head, length, dim]`."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("thd,hsd->hts", q.float(), k) * scale
    positions = torch.arange(first_position, first_position + tokens, device=q.device)
    visible = torch.arange(k.shape[1], device=q.device) <= positions[:, None]
    probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,hsd->thd", probabilities, v)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Store k and v `[tokens, kv_heads, dim]` at `slots` int64 `[tokens]` (page * page_size + offset; distinct).

    A negative slot is padding and is skipped.
    """
    page_size = kv.shape[3]
    kept = slots >= 0
    pages, offsets = slots[kept] // page_size, slots[kept] % page_size
    kv[pages, 0, :, offsets] = k[kept].to(kv.dtype)
    kv[pages, 1, :, offsets] = v[kept].to(kv.dtype)


def gather_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy `pages` int64 `[n]` of `pool [page, ...]` into a new contiguous `[n, ...]`, in order."""
    return pool.index_select(0, pages)


def scatter_pages(pool: Tensor, pages: Tensor, data: Tensor) -> None:
    """Copy `data [n, ...]` into `pages` int64 `[n]` (distinct) of `pool [page, ...]`, in order."""
    pool.index_copy_(0, pages, data)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; rounded to x's dtype before the weight, as Llama does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += delta, in place; returns rms_norm of the sum. x and delta `[tokens, hidden]`, both contiguous."""
    return rms_norm(x.add_(delta), weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + dim/2) of q `[tokens, heads, dim]` and k `[tokens, kv_heads, dim]`.

    cos and sin `[tokens, dim]`, their two halves equal. Returns new tensors: x * cos + rotate_half(x) * sin.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x.float() * cos.float().unsqueeze(1) + turned * sin.float().unsqueeze(1)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up [tokens, 2 * inter]` = gate beside up; returns `[tokens, inter]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slots: Tensor,
) -> Tensor:
    """All that happens between the projection of q, k, v and attention: head norms, `rope`, `write_kv`.

    qkv `[tokens, heads + 2 * kv_heads, dim]`, contiguous; q_norm and k_norm `[dim]` or None; the rest as in `rope` and
    `write_kv`. Returns the rotated q `[tokens, heads, dim]`.
    """
    q, k, v = split_heads(qkv, kv.shape[2])
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rope(q, k, cos, sin)
    write_kv(k, v, kv, slots)
    return q


def split_heads(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k, v in `qkv [tokens, heads + 2 * kv_heads, dim]`."""
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return q, k, v
