"""From configuration to an executor, and from an executor to what a worker tells about itself."""

from typing import NamedTuple

import structlog

from twostroke.cluster.config import FAKE_VOCAB_SIZE, Config
from twostroke.cluster.core.ids import Incarnation, WorkerId
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.engine.executor import Executor
from twostroke.engine.fake_executor import FakeExecutor
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.vocabulary import Vocabulary, byte_vocabulary, load_vocabulary

log = structlog.get_logger(__name__)

FAKE_CONTEXT = 8192


class Built(NamedTuple):
    executor: Executor
    device: str
    """Identity of the device: `cpu`, or one that no other GPU has."""
    grammars: GrammarCompiler


def make_executor(config: Config, role: Role) -> Built:
    """Blocking, for seconds to minutes with a real model; torch is imported only then. Raises ConfigError."""
    if config.model.fake:
        context = config.model.max_context or FAKE_CONTEXT
        pages, step_s = config.pages, config.model.fake_step_ms / 1e3
        fake = FakeExecutor(pages.num_pages, pages.page_size, FAKE_VOCAB_SIZE, context, step_s)
        return Built(fake, "cpu", GrammarCompiler(byte_vocabulary))
    import torch

    from twostroke.engine.model.load import build_executor
    from twostroke.engine.model.source import default_cache_dir, resolve

    def load() -> Vocabulary:
        return load_vocabulary(resolve(config.model.source, default_cache_dir(), lambda line: None))

    executor = build_executor(config, role, lambda message: log.info("loading", stage=message))
    if not torch.cuda.is_available():
        return Built(executor, "cpu", GrammarCompiler(load))
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return Built(executor, f"cuda:{uuid}", GrammarCompiler(load))


def describe_worker(
    config: Config,
    role: Role,
    worker_id: WorkerId,
    incarnation: Incarnation,
    address: str,
    built: Built,
    transports: tuple[str, ...],
) -> WorkerInfo:
    """What the worker tells at registration and on attach; `transports` are those that it has mounted."""
    executor, memory = built.executor, built.executor.memory
    pool_tokens = memory.num_pages * memory.layout.page_size
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        address=address,
        model=config.model.name or config.model.source,
        layout=memory.layout,
        num_pages=memory.num_pages,
        max_context=min(executor.max_positions, pool_tokens),
        chunk_tokens=config.prefill.chunk_tokens if role is Role.PREFILL else config.decode.chunk_tokens,
        transports=transports,
        device=built.device,
        weight_bytes=executor.weight_bytes,
    )
