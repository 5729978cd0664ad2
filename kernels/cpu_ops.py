"""The decoder's small operations on a CPU, compiled by numba, float32.

A decode step of a small model is bound by the number of calls, not by arithmetic: torch needs five to ten calls of
several microseconds for each of these, thirty layers a step. Each is one call here, on one thread. Shapes and
meaning of each: the function of the same name in `reference`.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

compiled: Callable[[Any], Any] = numba.njit(cache=True, nogil=True, fastmath=True, error_model="numpy")
"""Machine code on first use, kept on disk; fastmath lets LLVM vectorize sums, so NaN must not be relied on."""


def flat_view(tensor: Tensor) -> Any:
    """A one-dimensional array from the tensor's first element to the end of its storage.

    Of a strided view numba does not know that the last axis is dense, and then LLVM vectorizes nothing (six times
    slower); a flat array and explicit offsets say so.
    """
    length = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((length,), (1,)).numpy()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.dim() == 2:
        _rms_norm(flat_view(x), 1, x.stride(0), 0, weight.numpy(), np.float32(eps), out.numpy())
    else:
        flat_out = out.view(-1, x.shape[-1]).numpy()
        _rms_norm(flat_view(x), x.shape[1], x.stride(0), x.stride(1), weight.numpy(), np.float32(eps), flat_out)
    return out


@compiled
def _rms_norm(x: Any, inner: int, outer_stride: int, inner_stride: int, weight: Any, eps: Any, out: Any) -> None:
    size = out.shape[1]
    for row in range(out.shape[0]):
        start = row // inner * outer_stride + row % inner * inner_stride
        source = x[start : start + size]
        total = np.float32(0.0)
        for i in range(size):
            total += source[i] * source[i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = source[i] * factor * weight[i]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    out_q, out_k = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    cos_array, sin_array = cos.numpy(), sin.numpy()
    _rope(flat_view(q), q.stride(0), q.stride(1), cos_array, sin_array, out_q.numpy())
    _rope(flat_view(k), k.stride(0), k.stride(1), cos_array, sin_array, out_k.numpy())
    return out_q, out_k


@compiled
def _rope(x: Any, token_stride: int, head_stride: int, cos: Any, sin: Any, out: Any) -> None:
    half = out.shape[2] // 2
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            start = token * token_stride + head * head_stride
            low, high = x[start : start + half], x[start + half : start + 2 * half]
            for i in range(half):
                out[token, head, i] = low[i] * cos[token, i] - high[i] * sin[token, i]
                out[token, head, i + half] = high[i] * cos[token, i] + low[i] * sin[token, i]


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    shape = np.array(kv.shape[2:], dtype=np.int64)
    target, slot_array = flat_view(kv), slots.numpy()
    _write(flat_view(k), k.stride(0), k.stride(1), target, kv.stride(0), 0, shape, slot_array)
    _write(flat_view(v), v.stride(0), v.stride(1), target, kv.stride(0), kv.stride(1), shape, slot_array)


@compiled
def _write(
    x: Any, token_stride: int, head_stride: int, kv: Any, stride: int, offset: int, shape: Any, slots: Any
) -> None:
    heads, page_size, dim = shape[0], shape[1], shape[2]
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        base = slot // page_size * stride + offset + slot % page_size * dim
        for head in range(heads):
            source = token * token_stride + head * head_stride
            target = base + head * page_size * dim
            for i in range(dim):
                kv[target + i] = x[source + i]


def silu_mul(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype)
    _silu_mul(gate_up.contiguous().numpy(), out.numpy(), np.empty(width // 2, dtype=np.int32))
    return out


@compiled
def _silu_mul(gate_up: Any, out: Any, powers: Any) -> None:
    size = out.shape[1]
    for token in range(out.shape[0]):
        result = out[token]
        gate, up = gate_up[token, :size], gate_up[token, size:]
        for i in range(size):
            result[i] = -gate[i]
        exponentials(result, powers, size)
        for i in range(size):
            result[i] = gate[i] * up[i] / (np.float32(1.0) + result[i])


@compiled
def exponentials(x: Any, powers: Any, size: int) -> None:
    """x[i] = exp(x[i]) in place for i < size, to 2e-7 relative; `powers` is int32 scratch of that length.

    exp(x) = 2^n * 2^f with n rounded, as exponent bits, and 2^f by a polynomial on [-1/2, 1/2]. Vectorizes, while
    math.exp is a call of libm for each element where Intel's SVML is not installed.
    """
    scales = powers.view(np.float32)
    for i in range(size):
        # Clamped to normal numbers: 1e-38 is nothing beside 1, and 1e38 keeps a sigmoid's quotient at 0.
        y = min(max(x[i] * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(126.0))
        n = np.int32(np.floor(y + np.float32(0.5)))
        f = y - np.float32(n)
        powers[i] = (n + np.int32(127)) << np.int32(23)
        p = np.float32(1.5403530393381606e-4)
        p = p * f + np.float32(1.3333558146428443e-3)
        p = p * f + np.float32(9.618129107628477e-3)
        p = p * f + np.float32(5.550410866482158e-2)
        p = p * f + np.float32(2.402265069591007e-1)
        p = p * f + np.float32(6.931471805599453e-1)
        x[i] = p * f + np.float32(1.0)
    for i in range(size):
        x[i] *= scales[i]
