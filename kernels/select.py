"""Picks the implementation of every op once, by device; nobody else asks which device there is.

    cuda -> Triton kernels            cpu -> numba and torch

Each import happens inside the branch that needs it, so a CPU never imports Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one device. Shapes, dtypes and meaning of each: the function of the same name in `reference`."""

    paged_decode_attention: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    """(q, kv, page_table, lengths, scale) -> [rows, heads, dim]"""
    ragged_prefill_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    """(q, kv, page_table, query_starts, lengths, scale) -> [tokens, heads, dim]"""
    rotate_and_write: Callable[[Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(qkv, q_norm, k_norm, eps, cos, sin, kv, slots) -> q; writes kv"""
    gather_pages: Callable[[Tensor, Tensor], Tensor]
    """(pool, pages) -> [n, ...]"""
    scatter_pages: Callable[[Tensor, Tensor, Tensor], None]
    """(pool, pages, data): writes pool"""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x, weight, eps) -> like x"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x, delta, weight, eps) -> like x; adds delta to x"""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up) -> [tokens, inter]"""


def select_ops(device: torch.device) -> Ops:
    """The ops for tensors on `device`. Raises ValueError for a kind of device that has none."""
    if device.type == "cpu":
        return _cpu_ops()
    if device.type == "cuda":
        return _cuda_ops()
    raise ValueError(f"no kernels for device {device.type!r}; there are some for: cpu, cuda")


def _cpu_ops() -> Ops:
    from twostroke.kernels import cpu_attention, cpu_ops, reference

    return Ops(
        paged_decode_attention=cpu_attention.paged_decode_attention,
        ragged_prefill_attention=cpu_attention.ragged_prefill_attention,
        rotate_and_write=cpu_ops.rotate_and_write,
        gather_pages=reference.gather_pages,
        scatter_pages=reference.scatter_pages,
        rms_norm=cpu_ops.rms_norm,
        add_rms_norm=cpu_ops.add_rms_norm,
        silu_mul=cpu_ops.silu_mul,
    )


def _cuda_ops() -> Ops:
    from twostroke.kernels.page_copy import gather_pages, scatter_pages
    from twostroke.kernels.paged_decode_attention import paged_decode_attention
    from twostroke.kernels.ragged_prefill_attention import ragged_prefill_attention
    from twostroke.kernels.rms_norm import rms_norm
    from twostroke.kernels.rotate_and_write import add_rms_norm, rotate_and_write
    from twostroke.kernels.silu_mul import silu_mul

    return Ops(
        paged_decode_attention=paged_decode_attention,
        ragged_prefill_attention=ragged_prefill_attention,
        rotate_and_write=rotate_and_write,
        gather_pages=gather_pages,
        scatter_pages=scatter_pages,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
    )
