"""Each numba op against its plain twin, on shapes that divide by nothing, with NaN where none may look."""

from collections.abc import Iterator

import pytest
import torch

from twostroke.kernels import cpu_attention, cpu_ops, reference

# heads, KV heads, head_dim, page_size
SHAPES = [(9, 3, 64, 16), (4, 4, 10, 1), (6, 2, 20, 5), (5, 1, 128, 3)]
SHAPE_NAMES = "heads,kv_heads,dim,page_size"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    """Torch's threads, which are ours: the cut over two must change nothing."""
    return int(request.param)


@pytest.fixture(autouse=True)
def _threads_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if "threads" in request.fixturenames:
        torch.set_num_threads(request.getfixturevalue("threads"))
    yield
    torch.set_num_threads(before)


def filled_pool(lengths: list[int], kv_heads: int, dim: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer 1 of a pool, and the page table: NaN outside the rows' tokens, pages in no order."""
    torch.manual_seed(sum(lengths) + dim)
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    pool = torch.full((len(order), 3, 2, kv_heads, page_size, dim), float("nan"))
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages, order = order[:count], order[count:]
        table[row, :count] = torch.tensor(pages)
        for token in range(length):
            pool[pages[token // page_size], 1, :, :, token % page_size] = torch.randn(2, kv_heads, dim)
    return pool[:, 1], table


@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_decode_attention(threads: int, heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    lengths = [1, 17, 300, 0, 33, 1000]
    kv, table = filled_pool(lengths, kv_heads, dim, page_size)
    arguments = torch.randn(6, heads, dim), kv, table, torch.tensor(lengths, dtype=torch.int32), dim**-0.5
    torch.testing.assert_close(
        cpu_attention.paged_decode_attention(*arguments), reference.paged_decode_attention(*arguments)
    )


@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_prefill_attention_of_whole_prompts_chunks_and_single_tokens(
    heads: int, kv_heads: int, dim: int, page_size: int
) -> None:
    lengths, new = [1, 17, 40, 33], [1, 17, 7, 1]
    kv, table = filled_pool(lengths, kv_heads, dim, page_size)
    starts = torch.tensor([0, 1, 18, 25, 26], dtype=torch.int32)
    q = torch.randn(sum(new), heads, dim)
    arguments = q, kv, table, starts, torch.tensor(lengths, dtype=torch.int32), dim**-0.5
    torch.testing.assert_close(
        cpu_attention.ragged_prefill_attention(*arguments), reference.ragged_prefill_attention(*arguments)
    )


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 150])
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_rotate_and_write(
    threads: int, heads: int, kv_heads: int, dim: int, page_size: int, tokens: int, normed: bool
) -> None:
    torch.manual_seed(tokens)
    pools = [torch.zeros(200 // page_size + 1, 2, 2, kv_heads, page_size, dim) for _ in range(2)]
    slots = torch.randperm(200)[:tokens]
    slots[3::5] = -1
    angles = torch.randn(tokens, dim // 2).repeat(1, 2)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    norms = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    actual, expected = (
        module.rotate_and_write(qkv, *norms, 1e-5, angles.cos(), angles.sin(), pool[:, 1], slots)
        for module, pool in zip((cpu_ops, reference), pools, strict=True)
    )
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(pools[0], pools[1])


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (300, 576)])
def test_norms_and_silu(threads: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    x, delta, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(cpu_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    sums = [x.clone(), x.clone()]
    actual = cpu_ops.add_rms_norm(sums[0], delta, weight, 1e-5)
    torch.testing.assert_close(actual, reference.add_rms_norm(sums[1], delta, weight, 1e-5))
    torch.testing.assert_close(sums[0], sums[1])
    gate_up = 20 * torch.randn(shape[0], 2 * shape[1])
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_extreme_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30] + [1.0] * 6])
    torch.testing.assert_close(cpu_ops.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_a_failure_in_any_part_is_raised_after_all_parts_ended() -> None:
    ended: list[int] = []

    def kernel(begin: int, end: int) -> None:
        ended.append(begin)
        if begin:
            raise ArithmeticError(begin)

    with pytest.raises(ArithmeticError):
        cpu_ops.run_split(kernel, (), items=4, threads=2)
    assert sorted(ended) == [0, 2]
