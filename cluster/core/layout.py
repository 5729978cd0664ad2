"""What a KV page is, byte for byte, and the memory that holds pages.

A pool is `[page, layer, k|v, kv_head, slot, head_dim]`, so a page is one contiguous block (one descriptor a
transfer), a layer of a page is contiguous within it (layer-wise shipping), and so is a head range within each
layer's k and v (different tensor-parallel degrees on the two sides):

    page p ──┬── layer 0 ──┬── k ── head 0: slot 0..S-1 x head_dim | head 1 | ...
             │             └── v ── head 0 ...
             ├── layer 1 ...

Two workers compare layouts when they first meet; `check_compatible` refuses a pair by the name of the field
(FIELD-REPORTS B4-B6).
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

from twostroke.cluster.core.errors import LayoutMismatch
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.records import dataclass

PROTOCOL_VERSION = 1
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4}


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers of one kind within a page. Version 1 allows one group, of kind `gqa`.

    `offset_bytes` and `stride_bytes` place layer i of the group at offset + i * stride within the page.
    """

    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale_dtype: str
    offset_bytes: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Everything that must be equal before two workers may exchange pages."""

    protocol_version: int
    model_fingerprint: str
    page_size: int
    rope: str
    quantization: str
    groups: tuple[PageGroup, ...]

    @property
    def page_bytes(self) -> int:
        return sum(group.layers * group.stride_bytes for group in self.groups)


def gqa_layout(
    *,
    model_fingerprint: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    page_size: int,
    rope: str = "",
    quantization: str = "",
) -> PageLayout:
    """The version 1 layout: one group over all layers, densely packed.

    Raises ValueError for a dtype without a known size or a non-positive dimension.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} has no known size; known: {sorted(DTYPE_BYTES)}")
    if min(layers, kv_heads, head_dim, page_size) < 1:
        raise ValueError("layers, kv_heads, head_dim and page_size must be at least 1")
    stride = 2 * kv_heads * page_size * head_dim * DTYPE_BYTES[dtype]
    group = PageGroup("gqa", layers, kv_heads, head_dim, dtype, "", 0, stride)
    return PageLayout(PROTOCOL_VERSION, model_fingerprint, page_size, rope, quantization, (group,))


def check_compatible(ours: PageLayout, theirs: PageLayout) -> None:
    """Raise LayoutMismatch with the first field that differs, or that version 1 cannot carry."""
    for field in fields(PageLayout):
        if field.name == "groups":
            continue
        _same(field.name, getattr(ours, field.name), getattr(theirs, field.name))
    _same("groups.length", len(ours.groups), len(theirs.groups))
    for index, (our_group, their_group) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for field in fields(PageGroup):
            name = f"groups[{index}].{field.name}"
            _same(name, getattr(our_group, field.name), getattr(their_group, field.name))
    if len(ours.groups) != 1 or ours.groups[0].kind != "gqa":
        raise LayoutMismatch("groups", [group.kind for group in ours.groups], "one group of kind 'gqa'")


def _same(name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise LayoutMismatch(name, ours, theirs)


class PageMemory(Protocol):
    """The bytes behind page ids. Implemented by `engine.page_pool` (torch) and `transport.loopback` (bytearray).

    Safe to call from any thread for pages that the caller owns (invariant 2); it checks ranges, not ownership.
    Every method raises IndexError for a page outside the pool and ValueError for a buffer of the wrong length.
    """

    @property
    def layout(self) -> PageLayout: ...

    @property
    def num_pages(self) -> int: ...

    def read(self, pages: Sequence[PageId]) -> memoryview:
        """One host buffer with the bytes of `pages` in order, `len(pages) * layout.page_bytes` long.

        May alias the pool when one page is asked for; the caller must not write to it.
        """
        ...

    def write(self, pages: Sequence[PageId], data: memoryview) -> None:
        """Copy `data` (as from `read`) into `pages`, in order."""
        ...
