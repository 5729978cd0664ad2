"""From a configured source to a running executor."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from twostroke.cluster.config import Config
from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.messages import Role
from twostroke.engine.executor import Executor
from twostroke.engine.model.config import ModelConfig
from twostroke.engine.model.decoder import Decoder, Layer
from twostroke.engine.model.describe import ModelDescription, describe_model
from twostroke.engine.model.linear import Linear, dense_linear, fp16_packing_supported, fused, packed_linear
from twostroke.engine.model.source import default_cache_dir, resolve
from twostroke.engine.model.weights import Weights
from twostroke.engine.page_pool import PagePool
from twostroke.engine.torch_executor import TorchExecutor
from twostroke.kernels.select import select_ops

Progress = Callable[[str], None]


class Loaded(NamedTuple):
    decoder: Decoder
    weight_bytes: int
    """As `Executor.weight_bytes`."""


def build_executor(config: Config, role: Role, progress: Progress) -> Executor:
    """Find, convert if need be, and load the configured model for one worker.

    Blocking, for seconds to minutes; `progress` gets a line a stage. Raises ConfigError for a source that cannot
    be found or served.
    """
    directory = resolve(config.model.source, default_cache_dir(), progress)
    threads = config.prefill.threads if role is Role.PREFILL else config.decode.threads
    return load_executor(
        directory,
        page_size=config.pages.page_size,
        num_pages=config.pages.num_pages,
        threads=threads,
        linear=config.model.linear,
        max_context=config.model.max_context,
        progress=progress,
    )


def load_executor(
    directory: Path,
    *,
    page_size: int,
    num_pages: int,
    threads: int = 1,
    linear: str = "auto",
    max_context: int = 0,
    progress: Progress = lambda line: None,
) -> TorchExecutor:
    """Load a model directory. `max_context` 0: the model's own."""
    started_s = time.monotonic()
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = describe_model(directory)
    dtype = compute_dtype(model.config, device)
    packed = choose_packed(linear, device)
    max_positions = min(model.max_positions, max_context or model.max_positions)
    with torch.inference_mode():
        decoder, weight_bytes = load_decoder(directory, model.config, device, dtype, packed, max_positions, progress)
    _trim_heap()
    pool = PagePool(page_layout(model, page_size, dtype), num_pages, device)
    executor = TorchExecutor(decoder, weight_bytes, pool, model.vocab_size, max_positions, threads)
    form = "fp16-packed" if packed else str(dtype).removeprefix("torch.")
    progress(
        f"{directory.name}: {model.config.num_layers} layers, {form} linears, {num_pages} pages of {page_size} tokens "
        f"on {device}, loaded in {time.monotonic() - started_s:.1f} s"
    )
    return executor


def _trim_heap() -> None:
    """Loading frees as much as it keeps (parts that were fused or packed), and glibc would keep the holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # another libc than glibc has none
        trim(0)


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """float32 on a CPU (bfloat16 matmul is unusable on AVX2); on CUDA as stored, where float32 becomes bfloat16."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def choose_packed(linear: str, device: torch.device) -> bool:
    """Whether linears are fp16-packed. Raises ConfigError when asked for where it cannot be."""
    possible = device.type == "cpu" and fp16_packing_supported()
    if linear == "packed_fp16" and not possible:
        raise ConfigError(["model.linear: packed_fp16 needs a CPU with AVX2 and a torch with FBGEMM"])
    return possible and linear != "float32"


def page_layout(model: ModelDescription, page_size: int, dtype: torch.dtype) -> PageLayout:
    config = model.config
    return gqa_layout(
        model_fingerprint=model.fingerprint,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
        rope=config.rope_text,
    )


def load_decoder(
    directory: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool,
    max_positions: int,
    progress: Progress,
) -> Loaded:
    hidden, vocab = config.hidden_size, config.vocab_size
    linear_bytes = 0

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        nonlocal linear_bytes
        linear_bytes += (weight.numel() * 2 if packed else weight.nbytes) + (0 if bias is None else bias.nbytes)
        return (packed_linear if packed else dense_linear)(weight, bias)

    with Weights(directory, device, dtype) as weights:
        embedding = weights.take("model.embed_tokens.weight", (vocab, hidden))
        layers = []
        for index in range(config.num_layers):
            layers.append(_load_layer(weights, f"model.layers.{index}.", config, make))
            if (index + 1) % max(1, config.num_layers // 4) == 0:
                progress(f"loaded {index + 1} of {config.num_layers} layers")
        final_norm = weights.take("model.norm.weight", (hidden,))
        if not config.tied_embeddings:
            head = make(weights.take("lm_head.weight", (vocab, hidden)), None)
        elif packed:
            head = make(embedding, None)
        else:
            head = dense_linear(embedding, None)  # the same memory, counted once
        leftover = [name for name in weights.unused() if name != "lm_head.weight" or not config.tied_embeddings]
        if leftover:
            raise ConfigError([f"{directory}: weights that a {config.family} has no use for: {', '.join(leftover)}"])
    norms = [norm for layer in layers for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)]
    plain_bytes = sum(tensor.nbytes for tensor in (embedding, final_norm, *norms) if tensor is not None)
    decoder = Decoder(config, select_ops(device), embedding, layers, final_norm, head, max_positions)
    return Loaded(decoder, plain_bytes + linear_bytes)


def _load_layer(
    weights: Weights,
    prefix: str,
    config: ModelConfig,
    make: Callable[[torch.Tensor, torch.Tensor | None], Linear],
) -> Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim

    def linear(outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        matrices = [weights.take(f"{prefix}{name}.weight", (size, inputs)) for name, size in outputs.items()]
        biases = [weights.take(f"{prefix}{name}.bias", (size,)) for name, size in outputs.items()] if bias else []
        return make(fused(matrices), fused(biases) if bias else None)

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", (size,))

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(
            {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, hidden, config.qkv_bias
        ),
        q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
        output=linear({"self_attn.o_proj": hidden}, queries, config.output_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )
