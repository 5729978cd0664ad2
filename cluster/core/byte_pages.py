"""Page memory in a bytearray: the PageMemory of the fake executor, the loopback transport and the tests.

Life: allocated zeroed, written and read by whole pages, dropped with its owner. Copies happen under the
interpreter's lock page by page; ownership of pages is the caller's business (see `core.layout.PageMemory`).
"""

from collections.abc import Sequence

from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import PageLayout


class BytePages:
    """`num_pages` pages of `layout.page_bytes` bytes each. Implements `core.layout.PageMemory`."""

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self._layout = layout
        self._num_pages = num_pages
        self._bytes = bytearray(num_pages * layout.page_bytes)
        self._view = memoryview(self._bytes)

    @property
    def layout(self) -> PageLayout:
        return self._layout

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def page(self, page: PageId) -> memoryview:
        """The page's own bytes, writable: for the executor that computes into it. Raises IndexError."""
        if not 0 <= page < self._num_pages:
            raise IndexError(f"page {page} is outside 0..{self._num_pages - 1}")
        size = self._layout.page_bytes
        return self._view[page * size : (page + 1) * size]

    def read(self, pages: Sequence[PageId]) -> memoryview:
        if len(pages) == 1:
            return self.page(pages[0]).toreadonly()
        return memoryview(b"".join(self.page(page) for page in pages))

    def write(self, pages: Sequence[PageId], data: memoryview) -> None:
        targets = [self.page(page) for page in pages]
        source = data.cast("B") if data.nbytes else data
        size = self._layout.page_bytes
        if source.nbytes != len(targets) * size:
            raise ValueError(f"{source.nbytes} bytes for {len(targets)} pages of {size}")
        for index, target in enumerate(targets):
            target[:] = source[index * size : (index + 1) * size]
