"""GGUF import: one file becomes a directory that the rest of the system, and any other tool, can read.

    config.json  generation_config.json  model.safetensors (float32, exact)  tokenizer.json  tokenizer_config.json

Weights are dequantized once, so that a start maps a file instead of decoding it. The directory appears under its
name only when it is complete.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.cluster.core.errors import ConfigError
from twostroke.engine.model.gguf_tokenizer import write_tokenizer

Progress = Callable[[str], None]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, directory: Path, progress: Progress) -> None:
    """Write the model in `path` into the empty `directory`. Raises ConfigError for what cannot be served."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    progress(f"reading {path.name}")
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.source: {path}: {error}"]) from None
    fields = {name: field.contents() for name, field in reader.fields.items() if field.types}
    names = [tensor.name for tensor in reader.tensors]
    config = _config(fields, names, path)
    progress(f"dequantizing {len(names)} tensors")
    save_file(dict(_tensors(reader.tensors, config, path)), directory / "model.safetensors", {"format": "pt"})
    progress("writing the tokenizer")
    write_tokenizer(fields, path, directory)
    ends = [fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.eot_token_id")]
    generation = {"eos_token_id": sorted({end for end in ends if end is not None})}
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], tensors: list[str], path: Path) -> dict[str, Any]:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            [f"{path}: architecture {architecture!r} is not served from GGUF; known: {', '.join(ARCHITECTURES)}"]
        )

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise ConfigError([f"{path}: no {architecture}.{name}"])
        return value

    heads, hidden = get("attention.head_count"), get("embedding_length")
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base", 10000.0), "rope_type": "default"}
    scaling = get("rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    elif scaling != "none":
        raise ConfigError([f"{path}: RoPE scaling {scaling!r} is not served from GGUF; known: none, linear"])
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError([f"{path}: rotating a part of each head is not served"])
    return {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture] + "ForCausalLM"],
        "model_type": architecture,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def _tensors(tensors: Any, config: dict[str, Any], path: Path) -> Iterator[tuple[str, Array]]:
    from gguf.quants import dequantize

    for tensor in tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        parts = stem.split(".")
        if parts[0] == "blk" and len(parts) == 3 and parts[2] in _BLOCK:
            target = f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{suffix}"
        elif stem in _TOP:
            target = f"{_TOP[stem]}.{suffix}"
        else:
            raise ConfigError([f"{path}: tensor {tensor.name} is not served"])
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if config["model_type"] == "llama" and parts[-1] in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if parts[-1] == "attn_q" else "num_key_value_heads"]
            values = _unpermuted(values, heads)
        yield target, values


def _unpermuted(values: Array, heads: int) -> Array:
    """GGUF keeps Llama's rotated pairs side by side, Hugging Face in two halves of each head."""
    rows = values.shape[0]
    paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(values.shape))
