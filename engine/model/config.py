"""What a model is, read from a Hugging Face `config.json`. No torch, so that a router may read it too.

One configurable decoder serves the families below; everything else is refused by the name of the field that
it cannot honour, because a model that runs with a silently ignored setting answers 200 with wrong tokens
(FIELD-REPORTS B4).

    llama      (also SmolLM2) optional biases, llama3 or linear RoPE scaling
    mistral    llama with a sliding window: served up to the window, where the two are the same
    qwen2      biased q, k, v
    qwen3      RMS norm over each head of q and k
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.cluster.core.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE frequencies are stretched: `linear` divides all by `factor`; `llama3` only the low ones."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Context length in tokens; never over a sliding window."""
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str
    """As stored: float32, float16 or bfloat16. What to compute in is the executor's choice."""

    @property
    def rope_text(self) -> str:
        """RoPE in one comparable string, for `PageLayout.rope`."""
        if self.rope_scaling is None:
            return f"theta={self.rope_theta:g}"
        scaling = self.rope_scaling
        return (
            f"theta={self.rope_theta:g};{scaling.kind}={scaling.factor:g},{scaling.low_freq_factor:g},"
            f"{scaling.high_freq_factor:g},{scaling.original_max_positions}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError for a file that cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: not a JSON object"])
    return data


def load_model_config(directory: Path) -> ModelConfig:
    """Read `directory/config.json`. Raises ConfigError naming each field that cannot be served."""
    path = directory / "config.json"
    return parse_model_config(read_json(path), str(path))


def parse_model_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    family = data.get("model_type")
    if family not in FAMILIES:
        raise ConfigError([f"{where}: model_type {family!r} is not served; known: {', '.join(FAMILIES)}"])
    mistakes: list[str] = []

    def whole(name: str, default: int | None = None) -> int:
        value = data.get(name, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            mistakes.append(f"{where}: {name} must be a positive integer, is {value!r}")
            return 1
        return value

    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        mistakes.append(f"{where}: hidden_act {activation!r} is not served; known: silu")
    num_heads = whole("num_attention_heads")
    hidden_size = whole("hidden_size")
    max_positions = whole("max_position_embeddings", 2048)
    num_kv_heads = whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        mistakes.append(f"{where}: num_attention_heads {num_heads} is no multiple of {num_kv_heads} KV heads")
    head_dim = whole("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
    window = _sliding_window(data, family)
    attention_bias = bool(data.get("attention_bias", False))
    theta, scaling = _rope(data, where, max_positions, mistakes)
    config = ModelConfig(
        family=family,
        vocab_size=whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole("intermediate_size"),
        num_layers=whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=min(max_positions, window or max_positions),
        rms_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
    )
    if mistakes:
        raise ConfigError(mistakes)
    return config


def _sliding_window(data: Mapping[str, Any], family: str) -> int:
    """Tokens a layer may look back, 0 for all. Within the window the mask is plain causal, so it only limits."""
    layer_types = data.get("layer_types") or []
    if family.startswith("qwen") and not data.get("use_sliding_window", False):
        return 0
    if layer_types and "sliding_attention" not in layer_types:
        return 0
    # transformers leaves out values that equal its defaults, and Mistral's default is a window of 4096.
    return int(data.get("sliding_window", 4096 if family == "mistral" else None) or 0)


def _rope(
    data: Mapping[str, Any], where: str, max_positions: int, mistakes: list[str]
) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    merged = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = float(merged.get("rope_theta") or data.get("rope_theta") or 10000.0)
    if float(merged.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))) != 1.0:
        mistakes.append(f"{where}: partial_rotary_factor is not served")
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(merged["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(merged["factor"]),
            float(merged["low_freq_factor"]),
            float(merged["high_freq_factor"]),
            int(merged.get("original_max_position_embeddings") or max_positions),
        )
    mistakes.append(f"{where}: RoPE scaling {kind!r} is not served; known: default, linear, llama3")
    return theta, None
