"""Gathers pages of the pool into one flat message and scatters a message into pages.

    gather:  out[i] = pool[pages[i]]            scatter:  pool[pages[i]] = data[i]

A page is one contiguous block, so both are block copies; grid (page, part of the page).
Twins: `reference.gather_pages`, `reference.scatter_pages`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements a program copies."""


@triton.jit
def _copy_kernel(
    pool_ptr,  # [page, page_elements]
    pages_ptr,  # int64 [n], distinct
    data_ptr,  # [n, page_elements]
    pool_page_stride,
    data_page_stride,
    page_elements,
    TO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tl.static_assert(BLOCK % 128 == 0)
    index = tl.program_id(0).to(tl.int64)
    # int64 throughout: a pool holds more than 2^31 elements (FIELD-REPORTS F13).
    page = tl.load(pages_ptr + index).to(tl.int64)
    element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < page_elements
    in_pool = pool_ptr + page * pool_page_stride + element
    in_data = data_ptr + index * data_page_stride + element
    if TO_POOL:
        tl.store(in_pool, tl.load(in_data, mask=mask), mask=mask)
    else:
        tl.store(in_data, tl.load(in_pool, mask=mask), mask=mask)


def gather_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """As `reference.gather_pages`; each page of `pool` must be contiguous."""
    data = torch.empty((pages.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _copy(pool, pages, data, to_pool=False)
    return data


def scatter_pages(pool: Tensor, pages: Tensor, data: Tensor) -> None:
    """As `reference.scatter_pages`; each page of `pool` and of `data` must be contiguous."""
    assert data.shape == (pages.shape[0], *pool.shape[1:]), f"data {tuple(data.shape)} is not {pages.shape[0]} pages"
    _copy(pool, pages, data, to_pool=True)


def _copy(pool: Tensor, pages: Tensor, data: Tensor, *, to_pool: bool) -> None:
    if not data.numel():
        return
    assert pool[0].is_contiguous(), "a page must be one contiguous block"
    assert data[0].is_contiguous(), "a page must be one contiguous block"
    assert pool.dtype == data.dtype, f"pool is {pool.dtype}, data {data.dtype}"
    page_elements = data[0].numel()
    _copy_kernel[(pages.shape[0], triton.cdiv(page_elements, BLOCK))](
        pool, pages, data, pool.stride(0), data.stride(0), page_elements, TO_POOL=to_pool, BLOCK=BLOCK, num_warps=4
    )
