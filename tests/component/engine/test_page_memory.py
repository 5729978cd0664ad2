"""A pool on a CPU takes no memory before its pages are written."""

import psutil
import torch

from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import gqa_layout
from twostroke.engine.page_pool import PagePool

POOL_BYTES = 512 << 20


def test_an_unwritten_pool_is_zero_and_takes_no_memory() -> None:
    layout = gqa_layout(model_fingerprint="m", layers=1, kv_heads=2, head_dim=64, dtype="float32", page_size=16)
    before = psutil.Process().memory_info().rss
    pool = PagePool(layout, POOL_BYTES // layout.page_bytes, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < POOL_BYTES // 8

    last = PageId(pool.num_pages - 1)
    assert bytes(pool.read([last])) == bytes(layout.page_bytes)
    pool.write([last], memoryview(b"\x01" * layout.page_bytes))
    assert pool.tensor[last].view(torch.uint8).min() == 1
