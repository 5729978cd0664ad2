"""Which of the configured transports this installation can speak. Knows of torch without importing it."""

import importlib.util
from collections.abc import Sequence

import structlog

from twostroke.cluster.core.errors import ConfigError

log = structlog.get_logger(__name__)


def usable_transports(names: Sequence[str]) -> tuple[str, ...]:
    """In the given order, without `collective` where torch is missing. Raises ConfigError when none is left."""
    usable = tuple(name for name in names if name != "collective" or importlib.util.find_spec("torch"))
    if len(usable) < len(names):
        log.warning("transport_unusable", transport="collective", reason="torch is not installed")
    if not usable:
        raise ConfigError([f"transfer.transports: none of {list(names)} can be used without torch"])
    return usable
