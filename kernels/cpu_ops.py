"""The decoder's small operations on a CPU, compiled by numba, float32.

A decode step of a small model is bound by the number of calls as much as by arithmetic: torch needs five to ten calls
of several microseconds for each of these, thirty layers a step. Each is one call here. Shapes and meaning of each:
the function of the same name in `reference`.

Compiled code releases the GIL and is cached beside this file (or in NUMBA_CACHE_DIR). Large work is cut by hand over a
small pool of threads, not by numba's own layers: one of those ends the process when two engine threads enter it at
once, the other is a second OpenMP runtime that spins against torch's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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


_MIN_SPLIT = 64 * 1024
"""Elements under which waking another thread, some 50 microseconds, takes longer than it saves."""


def run_split(kernel: Callable[..., None], arguments: tuple[Any, ...], items: int, threads: int) -> None:
    """`kernel(*arguments, begin, end)` over `items` in `threads` parts, the first on this thread. Blocks for all."""
    cuts = [items * part // threads for part in range(threads + 1)]
    helpers = [_pool(threads - 1).submit(kernel, *arguments, *cuts[part : part + 2]) for part in range(1, threads)]
    try:
        kernel(*arguments, 0, cuts[1])
    finally:
        for helper in helpers:
            helper.result()


def _threads_for(elements: int, items: int) -> int:
    return max(1, min(torch.get_num_threads(), items, elements // _MIN_SPLIT))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm(
        x.contiguous().view(-1, x.shape[-1]).numpy(), weight.numpy(), np.float32(eps), out.view(-1, x.shape[-1]).numpy()
    )
    return out


@compiled
def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    for row in range(out.shape[0]):
        normalize(x[row], weight, eps, out[row])


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = x.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy()
    run_split(_add_rms_norm, arguments, x.shape[0], _threads_for(x.numel(), x.shape[0]))
    return out


@compiled
def _add_rms_norm(x: Any, delta: Any, weight: Any, eps: Any, out: Any, begin: int, end: int) -> None:
    for row in range(begin, end):
        for i in range(x.shape[1]):
            x[row, i] += delta[row, i]
        normalize(x[row], weight, eps, out[row])


@compiled
def normalize(source: Any, weight: Any, eps: Any, out: Any) -> None:
    size = source.shape[0]
    total = np.float32(0.0)
    for i in range(size):
        total += source[i] * source[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = source[i] * factor * weight[i]


_NO_NORM = np.empty(0, dtype=np.float32)


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
    kv_heads, page_size, dim = kv.shape[2:]
    tokens, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype)
    norms = [_NO_NORM if norm is None else norm.numpy() for norm in (q_norm, k_norm)]
    target, strides = flat_view(kv), (kv.stride(0), kv.stride(1), page_size)
    arguments = (
        qkv.numpy(),
        *norms,
        np.float32(eps),
        cos.numpy(),
        sin.numpy(),
        target,
        strides,
        slots.numpy(),
        q.numpy(),
    )
    run_split(_rotate_and_write, arguments, tokens, _threads_for(qkv.numel(), tokens))
    return q


@compiled
def _rotate_and_write(
    qkv: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    kv: Any,
    strides: Any,
    slots: Any,
    q: Any,
    begin: int,
    end: int,
) -> None:
    """A head at a time. Page p's keys start at kv[p * strides[0]], its values strides[1] further on."""
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = (qkv.shape[1] - heads) // 2
    page_stride, value_offset, page_size = strides
    normed = np.empty(dim, dtype=np.float32)
    for token in range(begin, end):
        for head in range(heads):
            source = qkv[token, head]
            if q_norm.shape[0]:
                normalize(source, q_norm, eps, normed)
                source = normed
            rotate(source, cos[token], sin[token], q[token, head])
        slot = slots[token]
        if slot < 0:
            continue
        for head in range(kv_heads):
            source = qkv[token, heads + head]
            if k_norm.shape[0]:
                normalize(source, k_norm, eps, normed)
                source = normed
            key = slot // page_size * page_stride + (head * page_size + slot % page_size) * dim
            rotate(source, cos[token], sin[token], kv[key : key + dim])
            value = kv[key + value_offset : key + value_offset + dim]
            for i in range(dim):
                value[i] = qkv[token, heads + kv_heads + head, i]


@compiled
def rotate(source: Any, cos: Any, sin: Any, out: Any) -> None:
    half = source.shape[0] // 2
    low, high = source[:half], source[half:]
    out_low, out_high = out[:half], out[half:]
    for i in range(half):
        out_low[i] = low[i] * cos[i] - high[i] * sin[i]
        out_high[i] = high[i] * cos[i] + low[i] * sin[i]


def silu_mul(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype)
    arguments = gate_up.contiguous().numpy(), out.numpy()
    # An exponential costs what several plain elements do.
    run_split(_silu_mul, arguments, tokens, _threads_for(2 * gate_up.numel(), tokens))
    return out


@compiled
def _silu_mul(gate_up: Any, out: Any, begin: int, end: int) -> None:
    size = out.shape[1]
    powers = np.empty(size, dtype=np.int32)
    for token in range(begin, end):
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


@compiled
def softmax(scores: Any, powers: Any, length: int) -> None:
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
