"""The pool of KV pages as one torch tensor, and its bytes for the transports.

    tensor [page, layer, k|v, kv_head, slot, head_dim]      page p is one contiguous block, see core.layout

Two owners never touch one page at a time: the engine thread computes on the pages of its jobs, transport threads
read pages that a job holds for them or write leased pages, which the engine does not read before `Committed`.
The pool checks ranges, not ownership.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import PageLayout


class PagePool:
    """Implements `core.layout.PageMemory`. Host pages are read in place; device pages go through pinned memory."""

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device) -> None:
        group = layout.groups[0]
        shape = (num_pages, group.layers, 2, group.kv_heads, layout.page_size, group.head_dim)
        dtype: torch.dtype = getattr(torch, group.dtype)
        self.tensor = (
            _untouched_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self._layout = layout
        self._bytes = self.tensor.view(num_pages, -1).view(torch.uint8)
        self._host: np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None = (
            self._bytes.numpy() if device.type == "cpu" else None
        )

    @property
    def layout(self) -> PageLayout:
        return self._layout

    @property
    def num_pages(self) -> int:
        return self.tensor.shape[0]

    def read(self, pages: Sequence[PageId]) -> memoryview:
        index = self._index(pages)
        if self._host is not None:
            if len(index) == 1:
                page: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._host[index[0]]
                return page.data.toreadonly()
            return self._host[index].reshape(-1).data
        gathered = self._bytes.index_select(0, torch.from_numpy(index).to(self._bytes.device))
        staged = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
        staged.copy_(gathered)
        host: np.ndarray[tuple[int], np.dtype[np.uint8]] = staged.numpy().reshape(-1)
        return host.data

    def write(self, pages: Sequence[PageId], data: memoryview) -> None:
        index = self._index(pages)
        expected = len(index) * self._layout.page_bytes
        if data.nbytes != expected:
            raise ValueError(f"{len(index)} pages take {expected} bytes, got {data.nbytes}")
        if not len(index):
            return
        rows = np.frombuffer(data, dtype=np.uint8).reshape(len(index), self._layout.page_bytes)
        if self._host is not None:
            self._host[index] = rows
            return
        staged = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        staged.numpy()[:] = rows
        self._bytes.index_copy_(0, torch.from_numpy(index).to(self._bytes.device), staged.to(self._bytes.device))
        # The caller may announce the pages at once, and the engine computes on a stream of its own.
        torch.cuda.current_stream(self._bytes.device).synchronize()

    def _index(self, pages: Sequence[PageId]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        index = np.fromiter(pages, dtype=np.int64, count=len(pages))
        if len(index) and (index.min() < 0 or index.max() >= self.num_pages):
            raise IndexError(f"page outside the pool of {self.num_pages}: {list(pages)}")
        return index


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory before a page is first written: NumPy's come from calloc, torch's are filled."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
