"""Every Triton kernel against its plain-torch twin under Triton's interpreter: indexing and masks, in float32.

Not collected by itself: `test_triton.py` runs it in a process of its own, where TRITON_INTERPRET is set before anything
imports Triton (transformers does). Numerics in half precision, races and speed need a GPU: tests/gpu.
"""

import mmap

import pytest
import torch

from tests.kernel_cases import SCALE, Shape, angles, build_paged, random_tensor, starts_of
from twostroke.kernels import reference
from twostroke.kernels.page_copy import gather_pages, scatter_pages
from twostroke.kernels.paged_decode_attention import paged_decode_attention
from twostroke.kernels.ragged_prefill_attention import ragged_prefill_attention
from twostroke.kernels.rms_norm import rms_norm
from twostroke.kernels.rope import rope
from twostroke.kernels.silu_mul import silu_mul
from twostroke.kernels.write_kv import write_kv

SHAPES = [
    Shape(heads=9, kv_heads=3, dim=64, page_size=16),  # the demo model
    Shape(heads=4, kv_heads=4, dim=20, page_size=4),  # no grouping, head_dim not a power of two
    Shape(heads=6, kv_heads=1, dim=8, page_size=1),  # multi-query, page of one slot, head_dim under a tensor-core tile
    Shape(heads=34, kv_heads=2, dim=80, page_size=5),  # a group over a tile, page size not a power of two
]
MAP_NORESERVE = 0x4000
"""Linux's number; the mmap module has no name for it."""
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@shapes
@pytest.mark.parametrize("splits", [None, 1, 2, 8])
def test_decode_attention(shape: Shape, splits: int | None) -> None:
    page = shape.page_size
    # One token, a full page, one over, one short of two, many tiles, and a padding row of no tokens.
    case = build_paged(shape, [1, page, page + 1, max(1, 2 * page - 1), 133, 0])
    q = random_tensor(6, shape.heads, shape.dim)

    actual = paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE, splits=splits)

    expected = reference.paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_decode_attention_over_strided_queries_and_a_wider_table() -> None:
    shape = Shape(heads=6, kv_heads=2, dim=12, page_size=4)
    case = build_paged(shape, [7, 4])
    fused = random_tensor(2, shape.heads + 4, shape.dim * 2)
    q = fused[:, 2:8, ::2]
    table = case.page_table.repeat(1, 3)[:, : case.page_table.shape[1]]

    actual = paged_decode_attention(q, case.kv, table, case.lengths, SCALE)

    torch.testing.assert_close(actual, reference.paged_decode_attention(q, case.kv, table, case.lengths, SCALE))


def test_decode_attention_with_large_scores_does_not_overflow() -> None:
    shape = Shape(heads=2, kv_heads=1, dim=16, page_size=4)
    case = build_paged(shape, [40])
    q = random_tensor(1, 2, 16) * 1e4

    actual = paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE, splits=2)

    expected = reference.paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE)
    torch.testing.assert_close(actual, expected)


def test_decode_attention_of_no_rows_is_empty() -> None:
    case = build_paged(SHAPES[1], [3])
    q = torch.empty(0, 4, 20)
    assert paged_decode_attention(q, case.kv, case.page_table[:0], case.lengths[:0], SCALE).shape == (0, 4, 20)


@shapes
def test_prefill_attention(shape: Shape) -> None:
    page = shape.page_size
    # (cached prefix, new): fresh, one new over a prefix of whole pages, mid-page, nothing new, a single token, long.
    prefixes = [0, 2 * page, page + 1, 3, 0, 9]
    new_tokens = [page + 3, 1, 2 * page, 0, 1, 71]
    case = build_paged(shape, [prefix + new for prefix, new in zip(prefixes, new_tokens, strict=True)])
    starts = starts_of(new_tokens)
    q = random_tensor(sum(new_tokens), shape.heads, shape.dim)

    actual = ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)

    expected = reference.ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_prefill_attention_of_many_short_sequences_finds_each_one() -> None:
    shape = Shape(heads=2, kv_heads=2, dim=16, page_size=4)
    new_tokens = [1, 0, 0, 2, 64, 1, 0, 63, 1, 65, 0]
    case = build_paged(shape, [new + 2 for new in new_tokens])
    starts = starts_of(new_tokens)
    q = random_tensor(sum(new_tokens), 2, 16)

    actual = ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)

    expected = reference.ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@shapes
def test_write_kv_changes_exactly_its_slots(shape: Shape) -> None:
    case = build_paged(shape, [11, 2])
    last_slot = case.pool.shape[0] * shape.page_size - 1
    slots = torch.tensor([0, last_slot, -1, 7, -1, shape.page_size + 1], dtype=torch.int64)
    fused = random_tensor(6, 2 * shape.kv_heads, shape.dim)
    k, v = fused[:, : shape.kv_heads], fused[:, shape.kv_heads :]
    expected_pool = case.pool.clone()
    reference.write_kv(k, v, expected_pool[:, 1], slots)

    write_kv(k, v, case.kv, slots)

    torch.testing.assert_close(case.pool, expected_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_shape", [(3, 2, 2, 4, 8), (2, 2, 3, 5, 13), (2, 2, 8, 16, 64), (1,)])
def test_pages_gathered_then_scattered_elsewhere(page_shape: tuple[int, ...]) -> None:
    pool = random_tensor(7, *page_shape)
    before = pool.clone()

    data = gather_pages(pool, torch.tensor([6, 0, 3]))
    scatter_pages(pool, torch.tensor([1, 2, 5]), data)

    assert torch.equal(data, before[[6, 0, 3]])
    assert torch.equal(pool, before[[0, 6, 0, 3, 4, 3, 6]])


def test_no_pages_gathered_and_scattered() -> None:
    pool = random_tensor(3, 2, 4)
    none = torch.empty(0, dtype=torch.int64)
    scatter_pages(pool, none, gather_pages(pool, none))
    assert torch.equal(pool, random_tensor(3, 2, 4))


@pytest.mark.parametrize("dim", [1, 20, 64, 576, 1100])
def test_rms_norm(dim: int) -> None:
    x, weight = random_tensor(5, dim), random_tensor(dim, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_within_a_fused_projection() -> None:
    x, weight = random_tensor(4, 9, 20)[:, 2:7], random_tensor(20, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (1, 1, 2), (5, 5, 20)])
def test_rope(heads: int, kv_heads: int, dim: int) -> None:
    fused = random_tensor(6, heads + kv_heads, dim)
    q, k = fused[:, :heads], fused[:, heads:]
    cos, sin = angles(6, dim)

    actual = rope(q, k, cos, sin)

    torch.testing.assert_close(actual, reference.rope(q, k, cos, sin))


@pytest.mark.parametrize("inter", [1, 33, 1024, 1536])
def test_silu_mul(inter: int) -> None:
    gate_up = random_tensor(3, 2 * inter + 2)[:, : 2 * inter]
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


class TestPoolsOver2To31Elements:
    """Page ids times the page stride pass 2^31 although both fit int32 (FIELD-REPORTS F13).

    The pool is a sparse anonymous mapping: 5.4 GB of addresses, a few pages of memory.
    """

    page, stride = 9, 1 << 28

    @pytest.fixture
    def kv(self) -> torch.Tensor:
        elements = 10 * self.stride
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, elements * 2, flags=flags), dtype=torch.float16)
        return flat.as_strided((10, 2, 2, 4, 16), (self.stride, 2 * 4 * 16, 4 * 16, 16, 1))

    def test_written_gathered_and_attended_at_the_right_place(self, kv: torch.Tensor) -> None:
        assert self.page * self.stride > 2**31
        k, v = random_tensor(4, 2, 16).half(), random_tensor(4, 2, 16, seed=1).half()
        write_kv(k, v, kv, torch.arange(4) + self.page * 4)
        assert torch.equal(kv[self.page, 0].transpose(0, 1), k)
        assert torch.equal(kv[self.page, 1].transpose(0, 1), v)

        q = random_tensor(2, 2, 16).half()
        table = torch.tensor([[self.page]], dtype=torch.int32)
        lengths = torch.tensor([4], dtype=torch.int32)
        decode = paged_decode_attention(q[:1], kv, table, lengths, SCALE)
        expected = reference.paged_decode_attention(q[:1], kv, table, lengths, SCALE)
        torch.testing.assert_close(decode, expected, atol=2e-3, rtol=2e-3)

        prefill = ragged_prefill_attention(q, kv, table, starts_of([2]), lengths, SCALE)
        expected = reference.ragged_prefill_attention(q, kv, table, starts_of([2]), lengths, SCALE)
        torch.testing.assert_close(prefill, expected, atol=2e-3, rtol=2e-3)

        gathered = gather_pages(kv, torch.tensor([self.page]))
        assert torch.equal(gathered[0], kv[self.page])
        scatter_pages(kv, torch.tensor([self.page - 1]), gathered)
        assert torch.equal(kv[self.page - 1], kv[self.page])
