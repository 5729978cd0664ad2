"""Inputs for the kernel tests, shared by the interpreter suite (CPU, float32, small) and tests/gpu (full matrix).

Every pool is poisoned: NaN in each slot that no sequence owns, in the other layers, and in the page that unused
page-table entries point to. A kernel that reads one element too many answers NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int

    def __str__(self) -> str:
        return f"h{self.heads}-kv{self.kv_heads}-d{self.dim}-p{self.page_size}"


@dataclass(frozen=True, slots=True)
class Paged:
    """One layer's view of a poisoned pool and the page table of each sequence."""

    pool: Tensor
    kv: Tensor
    page_table: Tensor
    lengths: Tensor


SCALE = 0.31
LAYERS, LAYER = 3, 1


def build_paged(
    shape: Shape, lengths: list[int], *, dtype: torch.dtype = torch.float32, device: str = "cpu", spare: int = 2
) -> Paged:
    """Sequences of `lengths` tokens on pages dealt at random; each table row ends in `spare` unused entries."""
    generator = torch.Generator().manual_seed(sum(lengths) + shape.dim)
    needed = [-(-length // shape.page_size) for length in lengths]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    poisoned_page = order.pop()
    pool = torch.full((num_pages, LAYERS, 2, shape.kv_heads, shape.page_size, shape.dim), float("nan"))
    table = torch.full((len(lengths), max([*needed, 1]) + spare), poisoned_page, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(needed[row]):
            page = order.pop()
            table[row, index] = page
            used = min(shape.page_size, length - index * shape.page_size)
            filling = torch.randn(2, shape.kv_heads, used, shape.dim, generator=generator)
            pool[page, LAYER, :, :, :used] = filling
    pool = pool.to(device, dtype)
    return Paged(pool, pool[:, LAYER], table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def random_tensor(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def angles(tokens: int, dim: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin `[tokens, dim]` of rotary angles at scattered positions, each half twice."""
    positions = torch.arange(tokens) * 7 + 3
    half = positions[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    whole = torch.cat((half, half), dim=-1)
    return whole.cos().to(device, dtype), whole.sin().to(device, dtype)


def starts_of(new_tokens: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *new_tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
