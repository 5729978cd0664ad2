"""What an executor says that its weights take."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.tiny_models import FAMILIES, make_tiny_model
from twostroke.engine.model.linear import fp16_packing_supported
from twostroke.engine.model.load import load_executor


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_the_file_holds_and_packed_ones_half_of_their_matrices(tmp_path: Path, family: str) -> None:
    directory = make_tiny_model(tmp_path / family, family)
    tensors = load_file(directory / "model.safetensors")
    plain = load_executor(directory, page_size=4, num_pages=4, linear="float32")
    assert plain.weight_bytes == sum(tensor.size * 4 for tensor in tensors.values())

    if not fp16_packing_supported():
        pytest.skip("no packed linears on this CPU")
    packed = load_executor(directory, page_size=4, num_pages=4, linear="packed_fp16")
    embedding = tensors["model.embed_tokens.weight"]
    matrices = sum(tensor.size for tensor in tensors.values() if tensor.ndim == 2)
    head = 0 if "lm_head.weight" in tensors else embedding.size * 2  # a tied one is packed beside the embedding
    assert packed.weight_bytes == plain.weight_bytes - (matrices - embedding.size) * 2 + head
