"""Sizes of the tiles that the attention kernels work on. Plain integers, so that the choice is tested without a GPU."""

from typing import NamedTuple

MIN_DOT = 16
"""Tensor cores multiply tiles of at least 16 x 16; smaller operands are padded by mask."""


class Tiling(NamedTuple):
    block_d: int
    """head_dim rounded up to a power of two, at least MIN_DOT; the excess is masked."""
    block_n: int
    """KV tokens a tile."""
    num_warps: int


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def attention_tiling(head_dim: int, element_bytes: int) -> Tiling:
    """Tiles of keys and values of at most 32 KiB each, so that two stages of both fit any GPU's shared memory."""
    block_d = max(MIN_DOT, next_power_of_two(head_dim))
    block_n = max(MIN_DOT, min(64, (32 << 10) // (2 * block_d * element_bytes)))
    return Tiling(block_d, block_n, num_warps=4 if block_d <= 128 else 8)


def num_splits(rows: int, kv_heads: int, max_tokens: int, block_n: int, processors: int) -> int:
    """Into how many parts each row's KV is cut so that about two programs run on each of `processors`.

    From the *width* of the page table, not from the lengths, which live on the device: reading them would
    stall the step and break graph capture. A short row's surplus parts end at once. A power of two (few
    variants of the reduce kernel), at most 64, and no part is shorter than four tiles.
    """
    wanted = -(-2 * processors // max(1, rows * kv_heads))
    longest = -(-max_tokens // (4 * block_n))
    return next_power_of_two(max(1, min(wanted, longest, 64)))
