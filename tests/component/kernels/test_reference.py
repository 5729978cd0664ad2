"""The plain torch ops against torch's own: what the fast kernels are later compared with must itself be right."""

import torch
from torch.nn import functional as F

from twostroke.kernels import reference


def test_decode_attention_equals_sdpa_over_the_gathered_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(7, 2, 3, 4, 10, generator=generator)
    q = torch.randn(1, 6, 10, generator=generator)
    k = kv[[5, 2, 6], 0].transpose(0, 1).reshape(3, 12, 10)[:, :9]
    v = kv[[5, 2, 6], 1].transpose(0, 1).reshape(3, 12, 10)[:, :9]
    expected = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], scale=0.3, enable_gqa=True)

    table = torch.tensor([[5, 2, 6, 99]], dtype=torch.int32)
    actual = reference.paged_decode_attention(q, kv, table, torch.tensor([9], dtype=torch.int32), 0.3)

    torch.testing.assert_close(actual, expected[0].transpose(0, 1))


def test_prefill_attention_of_one_token_is_decode_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(9, 2, 2, 4, 8, generator=generator)
    q = torch.randn(3, 4, 8, generator=generator)
    table = torch.tensor([[5, 2, 6], [0, 99, 99], [1, 3, 99]], dtype=torch.int32)
    lengths = torch.tensor([9, 1, 8], dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)

    prefill = reference.ragged_prefill_attention(q, kv, table, starts, lengths, 0.5)

    torch.testing.assert_close(prefill, reference.paged_decode_attention(q, kv, table, lengths, 0.5))


def test_prefill_attention_is_causal_over_a_whole_sequence() -> None:
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(3, 2, 2, 4, 8, generator=generator)
    q = torch.randn(11, 4, 8, generator=generator)
    k, v = (kv[:, part].transpose(0, 1).reshape(2, 12, 8)[:, :11] for part in (0, 1))
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=0.35, enable_gqa=True
    )

    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    bounds = torch.tensor([0, 11], dtype=torch.int32)
    actual = reference.ragged_prefill_attention(q, kv, table, bounds, bounds[1:], 0.35)

    torch.testing.assert_close(actual, expected[0].transpose(0, 1))


def test_rms_norm_equals_torch() -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (33,), weight, 1e-5))
