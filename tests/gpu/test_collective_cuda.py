"""What the collective transport does on a GPU and one GPU can show; NCCL itself needs two."""

import pytest
import torch

from twostroke.cluster.transport.collective_group import checksums

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", [2, 1024, 1536, 98304])
def test_sums_on_the_device_are_those_of_the_host(words: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    data = torch.randint(-(2**31), 2**31 - 1, (5, words), dtype=torch.int32).view(torch.uint8).flatten()
    assert checksums(data.cuda(), 5) == checksums(data, 5)
