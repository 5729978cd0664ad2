"""What an executor says that its weights take."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.tiny_models import FAMILIES, make_tiny_model
from twostroke.engine.model.config import load_model_config
from twostroke.engine.model.load import load_executor
from twostroke.engine.model.packed_decoder import packing_obstacle


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_the_file_holds_and_packed_ones_half_of_their_matrices(tmp_path: Path, family: str) -> None:
    directory = make_tiny_model(tmp_path / family, family, packable=True)
    tensors = load_file(directory / "model.safetensors")
    plain = load_executor(directory, page_size=4, num_pages=4, linear="float32")
    assert plain.weight_bytes == sum(tensor.size * 4 for tensor in tensors.values())

    if packing_obstacle(load_model_config(directory)):
        pytest.skip("no packed form on this CPU")
    packed = load_executor(directory, page_size=4, num_pages=4, linear="packed_fp16")
    embedding = tensors["model.embed_tokens.weight"]
    matrices = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 2)
    vocab, hidden = embedding.shape
    # The head's outputs come in sixteens; a tied one is packed beside the embedding, which stays float32.
    head = -(-vocab // 16) * 16 * hidden * 2
    untied = embedding.nbytes if "lm_head.weight" in tensors else 0
    layers = (matrices - embedding.nbytes - untied) // 2
    norms_and_biases = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 1)
    assert packed.weight_bytes == embedding.nbytes + layers + head + norms_and_biases
