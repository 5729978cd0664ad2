"""From a configured source to a running executor."""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.cluster.config import Config, usable_threads
from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.messages import Role
from twostroke.engine.executor import Executor
from twostroke.engine.model.config import ModelConfig
from twostroke.engine.model.decoder import Decoder, Layer
from twostroke.engine.model.describe import ModelDescription, describe_model
from twostroke.engine.model.linear import Linear, Matrix
from twostroke.engine.model.packed_decoder import PackedDecoder, PackedWeights, packing_obstacle
from twostroke.engine.model.source import default_cache_dir, resolve
from twostroke.engine.model.weights import Weights
from twostroke.engine.page_pool import PagePool
from twostroke.engine.torch_executor import TorchExecutor
from twostroke.kernels.select import select_ops

Progress = Callable[[str], None]


def build_executor(config: Config, role: Role, progress: Progress) -> Executor:
    """Find, convert if need be, and load the configured model for one worker.

    Blocking, for seconds to minutes; `progress` gets a line a stage. Raises ConfigError for a source that cannot
    be found or served.
    """
    directory = resolve(config.model.source, default_cache_dir(), progress)
    threads = usable_threads(config.prefill.threads if role is Role.PREFILL else config.decode.threads)
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
    packed = choose_packed(linear, device, model.config)
    max_positions = min(model.max_positions, max_context or model.max_positions)
    with torch.inference_mode():
        loading = Loading(directory, model.config, device, dtype, max_positions, progress)
        decoder = loading.packed_decoder(threads) if packed else loading.decoder()
    _trim_heap()
    pool = PagePool(page_layout(model, page_size, dtype), num_pages, device)
    executor = TorchExecutor(decoder, pool, model.vocab_size, max_positions, threads)
    form = "fp16-packed" if packed else str(dtype).removeprefix("torch.")
    progress(
        f"{directory.name}: {model.config.num_layers} layers, {form} linears, {num_pages} pages of {page_size} tokens "
        f"on {device}, loaded in {time.monotonic() - started_s:.1f} s"
    )
    return executor


def _trim_heap() -> None:
    """Loading frees as much as it keeps (what was fused or packed), and glibc would keep the holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # another libc than glibc has none
        trim(0)


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """float32 on a CPU (bfloat16 matmul is unusable on AVX2); on CUDA as stored, where float32 becomes bfloat16."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def choose_packed(linear: str, device: torch.device, config: ModelConfig) -> bool:
    """Whether linears are fp16-packed. Raises ConfigError when asked for where it cannot be."""
    obstacle = "is for CPUs" if device.type != "cpu" else packing_obstacle(config)
    if linear == "packed_fp16" and obstacle:
        raise ConfigError([f"model.linear: packed_fp16 {obstacle}"])
    return not obstacle and linear != "float32"


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


@dataclass(frozen=True, slots=True)
class Loading:
    """A model's weights on their way from files into one form of decoder."""

    directory: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    progress: Progress

    def decoder(self) -> Decoder:
        layers: list[Layer[Linear]] = []

        def put(index: int, layer: Layer[Matrix]) -> None:
            made = {name: Linear(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")}
            norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
            layers.append(
                Layer(norms[0], made["qkv"], *norms[1:3], made["output"], norms[3], made["gate_up"], made["down"])
            )

        embedding, final_norm, head = self._read(put)
        ops, linear = select_ops(self.device), Linear(Matrix([head]))
        return Decoder(self.config, ops, embedding, layers, final_norm, linear, self.max_positions)

    def packed_decoder(self, threads: int) -> PackedDecoder:
        packed = PackedWeights(self.config)
        embedding, final_norm, head = self._read(packed.put)
        return PackedDecoder(self.config, embedding, packed.finish(final_norm, head), self.max_positions, threads)

    def _read(self, put: Callable[[int, Layer[Matrix]], None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each layer to `put`; returns embedding, last norm and head. Raises ConfigError for leftovers."""
        config = self.config
        hidden, vocab = config.hidden_size, config.vocab_size
        with Weights(self.directory, self.device, self.dtype) as weights:
            embedding = weights.take("model.embed_tokens.weight", (vocab, hidden))
            for index in range(config.num_layers):
                put(index, _read_layer(weights, f"model.layers.{index}.", config))
                if (index + 1) % max(1, config.num_layers // 4) == 0:
                    self.progress(f"loaded {index + 1} of {config.num_layers} layers")
            final_norm = weights.take("model.norm.weight", (hidden,))
            head = embedding if config.tied_embeddings else weights.take("lm_head.weight", (vocab, hidden))
            leftover = [name for name in weights.unused() if name != "lm_head.weight" or not config.tied_embeddings]
            if leftover:
                unknown = f"weights that a {config.family} has no use for: {', '.join(leftover)}"
                raise ConfigError([f"{self.directory}: {unknown}"])
        return embedding, final_norm, head


def _read_layer(weights: Weights, prefix: str, config: ModelConfig) -> Layer[Matrix]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim

    def matrix(outputs: dict[str, int], inputs: int, bias: bool) -> Matrix:
        matrices = [weights.take(f"{prefix}{name}.weight", (size, inputs)) for name, size in outputs.items()]
        biases = [weights.take(f"{prefix}{name}.bias", (size,)) for name, size in outputs.items()] if bias else []
        return Matrix(matrices, biases)

    def norm(name: str, size: int) -> torch.Tensor:
        return weights.take(f"{prefix}{name}.weight", (size,))

    return Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=matrix(
            {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, hidden, config.qkv_bias
        ),
        q_norm=norm("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", dim) if config.qk_norm else None,
        output=matrix({"self_attn.o_proj": hidden}, queries, config.output_bias),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=matrix({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=matrix({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )
