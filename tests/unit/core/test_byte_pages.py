"""BytePages: bytes go where the page ids say, and nothing outside the pool is touched."""

import pytest

from twostroke.cluster.core.byte_pages import BytePages
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import gqa_layout

LAYOUT = gqa_layout(model_fingerprint="fake", layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=4)
SIZE = LAYOUT.page_bytes


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


def test_written_pages_are_read_back_in_the_asked_order() -> None:
    memory = BytePages(LAYOUT, num_pages=4)
    memory.write(pages(3, 1), memoryview(b"a" * SIZE + b"b" * SIZE))

    assert memory.read(pages(1, 3, 0)) == b"b" * SIZE + b"a" * SIZE + bytes(SIZE)
    assert memory.read(pages(3)) == b"a" * SIZE
    assert memory.read([]) == b""


def test_a_single_page_read_is_a_read_only_alias() -> None:
    memory = BytePages(LAYOUT, num_pages=1)
    view = memory.read(pages(0))
    memory.page(PageId(0))[0] = 7

    assert view[0] == 7
    assert view.readonly


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_outside_the_pool_is_an_index_error(page: int) -> None:
    memory = BytePages(LAYOUT, num_pages=4)
    with pytest.raises(IndexError):
        memory.read(pages(page))
    with pytest.raises(IndexError):
        memory.write(pages(0, page), memoryview(bytes(2 * SIZE)))
    assert memory.read(pages(0, 1, 2, 3)) == bytes(4 * SIZE)


def test_a_buffer_of_the_wrong_length_is_a_value_error() -> None:
    memory = BytePages(LAYOUT, num_pages=4)
    with pytest.raises(ValueError, match="bytes for 1 pages"):
        memory.write(pages(0), memoryview(bytes(SIZE + 1)))
    memory.write([], memoryview(b""))
