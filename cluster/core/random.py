"""Counter-based randomness: a token depends on its request's seed and its position, on nothing else.

`uniform(seed, index)` is the top 53 bits of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11) with key = seed and counter = output index, over 2^53. Batch, worker, attempt and
preemption do not enter, so a continued request goes on exactly where it stopped. Kernels must match the
golden vectors in `tests/unit/core/test_random.py`.
"""

import os
import secrets
from hashlib import blake2b
from itertools import count

_KEY = secrets.token_bytes(32)
_counter = count()
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32. All words are unsigned 32-bit, least significant word first."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0 = (k0 + _WEYL_0) & _MASK32
        k1 = (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """u in [0, 1) for the output token at `index` (0-based) of a choice with this 64-bit seed."""
    seed &= _MASK64
    key = (seed & _MASK32, seed >> 32)
    low, high, _, _ = philox4x32(key, (index & _MASK32, (index >> 32) & _MASK32, 0, 0))
    return ((high << 32 | low) >> 11) / (1 << 53)


def splitmix64(value: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA'14; one step."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request with seed `seed`."""
    return splitmix64((seed + choice) & _MASK64)


def draw_bytes(num: int) -> bytes:
    """`num` (at most 64) bytes that nobody can guess, and that no other call in any process returns.

    A keyed hash of a counter. The system's generator is as quick, but each call of it lets other threads have the
    interpreter, and under load it took the router 1.2 ms to get that back, twice a request.
    """
    return blake2b(b"%d.%d" % (os.getpid(), next(_counter)), key=_KEY, digest_size=num).digest()


def draw_seed() -> int:
    """A fresh 63-bit seed for a request that brought none (63 bits fit every signed wire type)."""
    return int.from_bytes(draw_bytes(8), "little") >> 1
