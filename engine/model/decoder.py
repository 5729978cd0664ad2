"""One decoder for the Llama family over paged KV.

    x = embed(tokens)
    each layer:  h = norm(x); q, k, v = qkv(h); [q, k = norms over each head]; rotate q, k; write k, v to their slots
                 x += output(attention(q, pages));   x += down(silu_mul(gate_up(norm(x))))
    logits = head(norm(x of the sampled tokens))

Decode rows (one new token) and prefill rows (many) share all linear layers of a step and differ in the attention
kernel only. Weights are plain tensors and callables; nothing here changes after construction but the pool.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twostroke.engine.batch import Batch
from twostroke.engine.model.config import ModelConfig, RopeScaling
from twostroke.engine.model.linear import Linear
from twostroke.kernels.select import Ops


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: torch.Tensor,
        layers: list[Layer],
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

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' k and v into `pool`; return float32 logits `[sampled, vocab]`."""
        eps = self._config.rms_eps
        ops = self._ops
        x = F.embedding(batch.tokens, self._embedding)
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            h = ops.rms_norm(x, layer.input_norm, eps)
            x = x + layer.output(self._attention(layer, h, rotation, batch, pool[:, index]))
            h = ops.rms_norm(x, layer.post_norm, eps)
            x = x + layer.down(ops.silu_mul(layer.gate_up(h)))
        sampled = ops.rms_norm(x[batch.sampled_tokens], self._final_norm, eps)
        return self._head(sampled).float()

    def _attention(
        self,
        layer: Layer,
        h: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """h `[tokens, hidden]` -> `[tokens, heads * head_dim]`; `kv` is this layer of the pool."""
        config, ops = self._config, self._ops
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(h).view(h.shape[0], heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_eps)
        q, k = ops.rope(q, k, *rotation)
        ops.write_kv(k, v, kv, batch.slots)
        num_decode, scale = batch.num_decode, self._scale
        table, lengths = batch.page_table, batch.lengths
        parts = []
        if num_decode:
            parts.append(
                ops.paged_decode_attention(q[:num_decode], kv, table[:num_decode], lengths[:num_decode], scale)
            )
        if num_decode < len(lengths):
            parts.append(
                ops.ragged_prefill_attention(
                    q[num_decode:], kv, table[num_decode:], batch.query_starts, lengths[num_decode:], scale
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.reshape(h.shape[0], heads * config.head_dim)


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
