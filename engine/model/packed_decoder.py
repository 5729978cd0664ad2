"""The decoder of `decoder.py` for a CPU: float16-packed weights, one compiled kernel a step (kernels/cpu_decoder.py).

Activations, sums and pages stay float32. Weights beyond float16's range saturate.
"""

import math
import platform
from collections.abc import Sequence

import numpy as np
import torch

from twostroke.engine.batch import Batch
from twostroke.engine.model.config import ModelConfig
from twostroke.engine.model.decoder import Layer, rope_tables
from twostroke.engine.model.linear import Matrix
from twostroke.kernels.cpu_decoder import (
    BLOCK_MEMBERS,
    Buffers,
    Projections,
    Rows,
    Shape,
    Weights,
    decoder_kernel,
    interleave,
    num_operations,
    pack_panels,
)
from twostroke.kernels.cpu_intrinsics import TILE_COLUMNS
from twostroke.kernels.cpu_team import Team


def packing_obstacle(config: ModelConfig) -> str:
    """Why this CPU or this model cannot use the packed form; empty when they can."""
    if platform.machine() not in ("aarch64", "arm64") and torch.backends.cpu.get_cpu_capability() not in (
        "AVX2",
        "AVX512",
    ):
        return "needs a CPU with AVX2 or an ARM one"
    for name, divisor in (("hidden_size", TILE_COLUMNS), ("head_dim", TILE_COLUMNS), ("intermediate_size", 8)):
        if getattr(config, name) % divisor:
            return f"needs a model whose {name} is a multiple of {divisor}"
    return ""


class PackedWeights:
    """Takes the layers one by one, so that no more than one is held unpacked."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_layers = config.num_layers
        self._arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}

    def put(self, index: int, layer: Layer[Matrix]) -> None:
        gate_up = layer.gate_up
        self._store("input_norm", index, layer.input_norm)
        self._store("q_norm", index, layer.q_norm)
        self._store("k_norm", index, layer.k_norm)
        self._store("post_norm", index, layer.post_norm)
        self._pack("qkv", index, layer.qkv.weight, layer.qkv.bias)
        self._pack("output", index, layer.output.weight, layer.output.bias)
        self._pack(
            "gate_up", index, _interleaved(gate_up.weights), _interleaved(gate_up.biases) if gate_up.biases else None
        )
        self._pack("down", index, layer.down.weight, layer.down.bias)

    def finish(self, final_norm: torch.Tensor, head: torch.Tensor) -> Weights:
        a = self._arrays

        def projections(name: str) -> Projections:
            return Projections(a[name], a[f"{name}_bias"])

        return Weights(
            input_norm=a["input_norm"],
            qkv=projections("qkv"),
            q_norm=a["q_norm"],
            k_norm=a["k_norm"],
            output=projections("output"),
            post_norm=a["post_norm"],
            gate_up=projections("gate_up"),
            down=projections("down"),
            final_norm=final_norm.float().numpy()[None],
            head=Projections(pack_panels(head.float().numpy())[None], np.empty((1, 0), dtype=np.float32)),
        )

    def _pack(self, name: str, index: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._put(name, index, pack_panels(weight.float().numpy()))
        padded = None
        if bias is not None:
            padded = torch.zeros(-(-bias.shape[0] // TILE_COLUMNS) * TILE_COLUMNS)
            padded[: bias.shape[0]] = bias
        self._store(f"{name}_bias", index, padded)

    def _store(self, name: str, index: int, values: torch.Tensor | None) -> None:
        self._put(name, index, np.empty(0, dtype=np.float32) if values is None else values.float().numpy())

    def _put(self, name: str, index: int, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
        if name not in self._arrays:
            self._arrays[name] = np.empty((self._num_layers, *values.shape), dtype=values.dtype)
        self._arrays[name][index] = values


def _interleaved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    gate, up = (part.float().numpy() for part in parts)
    return torch.from_numpy(interleave(gate, up))


class PackedDecoder:
    """Used by the engine thread alone. Keeps buffers as large as the largest step so far."""

    def __init__(
        self, config: ModelConfig, embedding: torch.Tensor, weights: Weights, max_positions: int, threads: int
    ) -> None:
        self._config = config
        self._embedding = embedding
        self._weights = weights
        self._team = Team(threads)
        self._cos, self._sin = rope_tables(config, max_positions, embedding.device)
        self._buffers = self._allocate(0, 0)
        self._num_operations = num_operations(config.num_layers)

    @property
    def weight_bytes(self) -> int:
        """Packed weights and the embedding."""
        total = self._embedding.nbytes
        for part in self._weights:
            total += sum(array.nbytes for array in part) if isinstance(part, Projections) else part.nbytes
        return total

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' k and v into `pool`; return float32 logits `[sampled, vocab]`.

        The logits are valid until the next call.
        """
        tokens, sampled = batch.tokens.shape[0], batch.sampled_tokens.shape[0]
        if tokens > self._buffers.x.shape[0] or sampled > self._buffers.logits.shape[0]:
            self._buffers = self._allocate(
                max(tokens, self._buffers.x.shape[0]), max(sampled, self._buffers.logits.shape[0])
            )
        buffers, config = self._buffers, self._config
        torch.index_select(self._embedding, 0, batch.tokens, out=torch.from_numpy(buffers.x[:tokens]))
        rows = Rows(
            cos=self._cos[batch.positions].numpy(),
            sin=self._sin[batch.positions].numpy(),
            slots=batch.slots.numpy(),
            blocks=attention_blocks(batch, max(1, BLOCK_MEMBERS * config.num_kv_heads // config.num_heads)),
            page_table=batch.page_table.numpy(),
            sampled=batch.sampled_tokens.numpy(),
        )
        shape = Shape(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            page_size=pool.shape[4],
            page_stride=pool.stride(0),
            layer_stride=pool.stride(1),
            value_stride=pool.stride(2),
            eps=np.float32(config.rms_eps),
            scale=np.float32(1.0 / math.sqrt(config.head_dim)),
            threads=self._team.threads,
        )
        self._team.run(
            decoder_kernel, (self._weights, shape, rows, buffers, pool.view(-1).numpy()), self._num_operations
        )
        return torch.from_numpy(buffers.logits[:sampled, : config.vocab_size])

    def _allocate(self, tokens: int, sampled: int) -> Buffers:
        config, weights = self._config, self._weights

        def rows(width: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
            return np.empty((tokens, width), dtype=np.float32)

        queries = config.num_heads * config.head_dim
        return Buffers(
            x=rows(config.hidden_size),
            h=rows(config.hidden_size),
            qkv=rows(weights.qkv.panels.shape[1] // config.hidden_size),
            q=rows(queries),
            attended=rows(queries),
            inner=rows(config.intermediate_size),
            logits=np.empty((sampled, weights.head.panels.shape[1] // config.hidden_size), dtype=np.float32),
        )


def attention_blocks(batch: Batch, block_tokens: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """int64 `[blocks, 4]` as in `Rows.blocks`: one for each decode row, `block_tokens` for prefill rows."""
    num_decode = batch.num_decode
    lengths = batch.lengths.tolist()
    blocks = [(row, row, 1, lengths[row]) for row in range(num_decode)]
    starts = batch.query_starts.tolist()
    for number, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        seen = lengths[num_decode + number] - (end - begin)
        for first in range(begin, end, block_tokens):
            count = min(block_tokens, end - first)
            blocks.append((num_decode + number, num_decode + first, count, seen + first - begin + 1))
    return np.array(blocks, dtype=np.int64)
