"""The decoder's fused steps on a CUDA device, from the Triton kernels. One kernel each on a CPU, see `cpu_ops`.

Meaning of each: the function of the same name in `reference`.
"""

from torch import Tensor

from twostroke.kernels.reference import split_heads
from twostroke.kernels.rms_norm import rms_norm
from twostroke.kernels.rope import rope
from twostroke.kernels.write_kv import write_kv


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.add_(delta), weight, eps)


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
    q, k, v = split_heads(qkv, kv.shape[2])
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rope(q, k, cos, sin)
    write_kv(k, v, kv, slots)
    return q
