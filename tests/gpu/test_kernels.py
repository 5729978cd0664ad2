"""Every Triton kernel on a GPU against its plain-torch twin: the full matrix of shapes and dtypes.

The twin runs on the same rounded inputs in float32, so tolerances cover the kernel's rounding alone: the output's
own and, in attention, that of the weights to the values' dtype.
"""

import pytest
import torch

from tests.kernel_cases import SCALE, Shape, angles, build_paged, random_tensor, starts_of
from twostroke.kernels import reference
from twostroke.kernels.select import Ops, select_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [
    Shape(heads=9, kv_heads=3, dim=64, page_size=16),
    Shape(heads=32, kv_heads=8, dim=128, page_size=16),
    Shape(heads=8, kv_heads=8, dim=80, page_size=4),
    Shape(heads=71, kv_heads=1, dim=64, page_size=1),
    Shape(heads=16, kv_heads=4, dim=256, page_size=32),
    Shape(heads=6, kv_heads=2, dim=20, page_size=5),
]
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops(torch.device(DEVICE))


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@dtypes
@shapes
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_decode_attention(ops: Ops, dtype: torch.dtype, shape: Shape, rows: int) -> None:
    page = shape.page_size
    lengths = [(1, page, page + 1, 517, 0, 2 * page, 2049)[row % 7] for row in range(rows)]
    case = build_paged(shape, lengths, dtype=dtype, device=DEVICE)
    q = random_tensor(rows, shape.heads, shape.dim, dtype=dtype, device=DEVICE)

    actual = ops.paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE)

    _close(actual, reference.paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE), dtype)


@dtypes
@pytest.mark.parametrize("splits", [1, 2, 16, 64])
def test_decode_attention_of_one_long_row_in_any_number_of_parts(dtype: torch.dtype, splits: int) -> None:
    from twostroke.kernels.paged_decode_attention import paged_decode_attention

    shape = SHAPES[1]
    case = build_paged(shape, [8191], dtype=dtype, device=DEVICE)
    q = random_tensor(1, shape.heads, shape.dim, dtype=dtype, device=DEVICE)

    actual = paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE, splits=splits)

    _close(actual, reference.paged_decode_attention(q, case.kv, case.page_table, case.lengths, SCALE), dtype)


def test_decode_attention_in_a_cuda_graph_follows_new_lengths(ops: Ops) -> None:
    shape = SHAPES[0]
    case = build_paged(shape, [40, 9], dtype=torch.float16, device=DEVICE)
    q = random_tensor(2, shape.heads, shape.dim, dtype=torch.float16, device=DEVICE)
    lengths = case.lengths.clone()
    ops.paged_decode_attention(q, case.kv, case.page_table, lengths, SCALE)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = ops.paged_decode_attention(q, case.kv, case.page_table, lengths, SCALE)

    for new_lengths in ([40, 9], [17, 0], [1, 8]):
        lengths.copy_(torch.tensor(new_lengths, dtype=torch.int32))
        graph.replay()
        expected = reference.paged_decode_attention(q, case.kv, case.page_table, lengths, SCALE)
        _close(actual, expected, torch.float16)


@dtypes
@shapes
def test_prefill_attention(ops: Ops, dtype: torch.dtype, shape: Shape) -> None:
    page = shape.page_size
    prefixes = [0, 2 * page, page + 1, 3, 0, 1000]
    new_tokens = [page + 3, 1, 2 * page, 0, 513, 129]
    lengths = [prefix + new for prefix, new in zip(prefixes, new_tokens, strict=True)]
    case = build_paged(shape, lengths, dtype=dtype, device=DEVICE)
    starts = starts_of(new_tokens, DEVICE)
    q = random_tensor(sum(new_tokens), shape.heads, shape.dim, dtype=dtype, device=DEVICE)

    actual = ops.ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)

    expected = reference.ragged_prefill_attention(q, case.kv, case.page_table, starts, case.lengths, SCALE)
    _close(actual, expected, dtype)


@dtypes
@shapes
def test_write_kv_changes_exactly_its_slots(dtype: torch.dtype, shape: Shape) -> None:
    case = build_paged(shape, [100, 2], dtype=dtype, device=DEVICE)
    num_slots = case.pool.shape[0] * shape.page_size
    slots = torch.randperm(num_slots)[:33].to(DEVICE)
    slots[::5] = -1
    fused = random_tensor(33, 2 * shape.kv_heads, shape.dim, dtype=dtype, device=DEVICE)
    k, v = fused[:, : shape.kv_heads], fused[:, shape.kv_heads :]
    expected = case.pool.clone()
    reference.write_kv(k, v, expected[:, 1], slots)

    from twostroke.kernels.write_kv import write_kv

    write_kv(k, v, case.kv, slots)

    torch.testing.assert_close(case.pool, expected, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_pages_gathered_then_scattered_elsewhere(ops: Ops, dtype: torch.dtype) -> None:
    pool = random_tensor(64, 30, 2, 3, 16, 64, dtype=dtype, device=DEVICE)
    expected = pool.clone()
    order = torch.randperm(64).to(DEVICE)
    sources, targets = order[:20], order[20:40]
    expected[targets] = expected[sources]

    ops.scatter_pages(pool, targets, ops.gather_pages(pool, sources))

    assert torch.equal(pool, expected)


@dtypes
@pytest.mark.parametrize("dim", [20, 64, 576, 4096, 5000])
def test_rms_norm(ops: Ops, dtype: torch.dtype, dim: int) -> None:
    x = random_tensor(37, 5, dim, dtype=dtype, device=DEVICE)[:, 1:4]
    weight = random_tensor(dim, seed=1, dtype=dtype, device=DEVICE)
    _close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (64, 1, 80)])
def test_rope(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    fused = random_tensor(129, heads + kv_heads, dim, dtype=dtype, device=DEVICE)
    q, k = fused[:, :heads], fused[:, heads:]
    cos, sin = angles(129, dim, device=DEVICE)
    from twostroke.kernels.rope import rope

    for actual, expected in zip(rope(q, k, cos, sin), reference.rope(q, k, cos, sin), strict=True):
        _close(actual, expected, dtype)


@dtypes
@pytest.mark.parametrize("inter", [33, 1536, 14336])
def test_silu_mul(ops: Ops, dtype: torch.dtype, inter: int) -> None:
    gate_up = random_tensor(65, 2 * inter, dtype=dtype, device=DEVICE)
    _close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)


def test_a_pool_of_more_than_2_to_31_elements(ops: Ops) -> None:
    """Page id times stride passes 2^31 (FIELD-REPORTS F13): 6 GB, the last pages used."""
    kv_heads, page_size, dim = 8, 16, 128
    num_pages = 3 * 2**30 // (2 * kv_heads * page_size * dim)
    pool = torch.zeros(num_pages, 1, 2, kv_heads, page_size, dim, dtype=torch.float16, device=DEVICE)
    kv = pool[:, 0]
    assert (num_pages - 1) * kv.stride(0) > 2**31
    pages = torch.tensor([num_pages - 1, num_pages - 3], device=DEVICE)
    slots = torch.cat([page * page_size + torch.arange(page_size, device=DEVICE) for page in pages])
    k = random_tensor(32, kv_heads, dim, dtype=torch.float16, device=DEVICE)
    from twostroke.kernels.write_kv import write_kv

    write_kv(k, k, kv, slots)
    assert torch.equal(kv[pages[0], 0].transpose(0, 1), k[:16])

    q = random_tensor(5, 32, dim, dtype=torch.float16, device=DEVICE)
    table, lengths = pages.int()[None], torch.tensor([31], dtype=torch.int32, device=DEVICE)
    expected = reference.paged_decode_attention(q[:1], kv, table, lengths, SCALE)
    _close(ops.paged_decode_attention(q[:1], kv, table, lengths, SCALE), expected, torch.float16)
    starts = starts_of([5], DEVICE)
    expected = reference.ragged_prefill_attention(q, kv, table, starts, lengths, SCALE)
    _close(ops.ragged_prefill_attention(q, kv, table, starts, lengths, SCALE), expected, torch.float16)
    assert torch.equal(ops.gather_pages(pool, pages), pool[pages])
