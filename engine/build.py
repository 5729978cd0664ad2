"""From configuration to an executor, and from an executor to what a worker tells about itself."""

import structlog

from twostroke.cluster.config import Config
from twostroke.cluster.core.ids import Incarnation, WorkerId
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.engine.executor import Executor
from twostroke.engine.fake_executor import FakeExecutor

log = structlog.get_logger(__name__)

FAKE_VOCABULARY = 32_000
FAKE_CONTEXT = 8192


def make_executor(config: Config, role: Role) -> Executor:
    """Blocking, for seconds to minutes with a real model; torch is imported only then. Raises ConfigError."""
    if config.model.fake:
        context = config.model.max_context or FAKE_CONTEXT
        return FakeExecutor(config.pages.num_pages, config.pages.page_size, FAKE_VOCABULARY, context)
    from twostroke.engine.model.load import build_executor

    return build_executor(config, role, lambda message: log.info("loading", stage=message))


def describe_worker(
    config: Config, role: Role, worker_id: WorkerId, incarnation: Incarnation, address: str, executor: Executor
) -> WorkerInfo:
    """What the worker tells at registration and on attach."""
    memory = executor.memory
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
        transports=config.transfer.transports,
    )
