"""Tiny random models of every family, complete with tokenizer and chat template; made without torch in milliseconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

FAMILIES = ("llama", "llama3_scaled", "mistral", "qwen2", "qwen3")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_TOKEN = SPECIALS.index("<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    directory: Path, family: str = "llama", seed: int = 0, max_positions: int = 512, packable: bool = False
) -> Path:
    """Write config, weights, tokenizer and template of a 2-layer model into `directory`, and return it.

    Weights are wide enough that greedy choices are clear: the gap of the two best logits is far over rounding.
    `packable`: of a shape that can be packed, with matrices that float16 holds exactly.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, max_positions)
    if packable:
        config["head_dim"] = 16
    generator = np.random.default_rng(seed)
    weights = {
        name: (1 + 0.1 * generator.standard_normal(shape) if len(shape) == 1 else _matrix(generator, shape)).astype(
            np.float32
        )
        for name, shape in _shapes(config).items()
    }
    if packable:
        weights = {name: values.astype(np.float16).astype(np.float32) for name, values in weights.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": END_TOKEN})
    _write_tokenizer(directory)
    return directory


def tiny_config(family: str, max_positions: int = 512) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    if family == "llama3_scaled":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    kind = "llama" if family == "llama3_scaled" else family
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16 if kind == "qwen3" else 8,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": family in ("llama", "qwen3"),
        "sliding_window": None,
        "attention_bias": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_TOKEN,
        "pad_token_id": SPECIALS.index("<|pad|>"),
    }


def _matrix(generator: np.random.Generator, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return generator.standard_normal(shape) * (1.5 / np.sqrt(shape[1]))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, out in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (out, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (out,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _write_tokenizer(directory: Path) -> None:
    """Byte-level without merges: every text has ids, every id but the specials is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    _write(directory / "tokenizer_config.json", settings)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
