"""One decoder for the Llama family over paged KV.

    x = embed(tokens)
    each layer:  h = norm(x); q, k, v = qkv(h); [q, k = norms over each head]; rotate q, k; write k, v to their slots
                 x += output(attention(q, pages));   x += down(silu_mul(gate_up(norm(x))))
    logits = head(norm(x of the sampled tokens))

Decode rows (one new token) and prefill rows (many) share all linear layers of a step and differ in the attention
kernel only. Behind its attention, the last layer computes the sampled tokens alone. Weights are plain tensors and
callables; nothing here changes after construction but the pool.
"""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F

from twostroke.engine.batch import Batch
from twostroke.engine.model.config import ModelConfig, RopeScaling
from twostroke.engine.model.linear import Linear
from twostroke.kernels.select import Ops

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Layer(Generic[L]):
    """`L` is the form of its projections: weights as loaded, or what computes with them."""

    input_norm: torch.Tensor
    qkv: L
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: L
    post_norm: torch.Tensor
    gate_up: L
    down: L


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: torch.Tensor,
        layers: list[Layer[Linear]],
        final_norm: torch.Tensor,
        head: Linear,
        max_positions: int,
    ) -> None:
        self._config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._cos, self._sin = rope_tables(config, max_positions, embedding.device)

    @property
    def weight_bytes(self) -> int:
        seen = {self._embedding.data_ptr(): self._embedding.nbytes}
        tensors = [self._final_norm, *self._head.tensors]
        for layer in self._layers:
            tensors += [
                norm for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm) if norm is not None
            ]
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                tensors += linear.tensors
        return sum((seen | {tensor.data_ptr(): tensor.nbytes for tensor in tensors}).values())

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' k and v into `pool`; return float32 logits `[sampled, vocab]`."""
        eps, ops = self._config.rms_eps, self._ops
        x = F.embedding(batch.tokens, self._embedding)
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        kv_of_layers = pool.unbind(1)
        # The norm before each layer, and last the one before the head; each also adds what came before to x.
        norms = [layer.input_norm for layer in self._layers] + [self._final_norm]
        h = ops.rms_norm(x, norms[0], eps)
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, h, rotation, batch, kv_of_layers[index])
            if index == len(self._layers) - 1 and len(batch.sampled_tokens) < len(x):
                x, attended = x[batch.sampled_tokens], attended[batch.sampled_tokens]
                if not len(x):
                    return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
            h = ops.add_rms_norm(x, layer.output(attended), layer.post_norm, eps)
            h = ops.add_rms_norm(x, layer.down(ops.silu_mul(layer.gate_up(h))), norms[index + 1], eps)
        return self._head(h).float()

    def _attention(
        self,
        layer: Layer[Linear],
        h: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """h `[tokens, hidden]` -> `[tokens, heads * head_dim]`; `kv` is this layer of the pool."""
        config, ops = self._config, self._ops
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, config.head_dim)
        q = ops.rotate_and_write(qkv, layer.q_norm, layer.k_norm, config.rms_eps, *rotation, kv, batch.slots)
        num_decode, scale = batch.num_decode, self._scale
        table, lengths = batch.page_table, batch.lengths
        if num_decode == len(lengths):
            attended = ops.paged_decode_attention(q, kv, table, lengths, scale)
            return attended.view(h.shape[0], heads * config.head_dim)
        attended = ops.ragged_prefill_attention(
            q[num_decode:], kv, table[num_decode:], batch.query_starts, lengths[num_decode:], scale
        )
        if num_decode:
            first = ops.paged_decode_attention(q[:num_decode], kv, table[:num_decode], lengths[:num_decode], scale)
            attended = torch.cat((first, attended))
        return attended.view(h.shape[0], heads * config.head_dim)


def rope_tables(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 `[num_positions, head_dim]`, halves equal."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's stretch: wavelengths over the old context by `factor`, short ones not at all, a ramp between."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return frequencies * ((1 - ramp) / scaling.factor + ramp)
