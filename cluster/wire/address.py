"""Under which address others reach this process. Nothing is sent to find it out."""

import socket
from urllib.parse import urlsplit

from twostroke.cluster.core.errors import ConfigError

ANY = "0.0.0.0"
FAR_AWAY = "192.0.2.1"
"""Of a range that is nobody's (RFC 5737): the way there is the default route."""


def advertised_host(host: str, advertise: str, redis_url: str) -> str:
    """What a worker tells others to connect to: as configured, or where it listens, or, listening on every
    address, this node's own on the way to Redis, where the other processes are found too. Blocks while Redis' name
    is resolved. Raises ConfigError when the node has no such address.
    """
    if advertise or host != ANY:
        return advertise or host
    for target in (urlsplit(redis_url).hostname, FAR_AWAY):
        found = _own_address(target) if target else None
        if found is not None:
            return found
    raise ConfigError(["worker.advertise: this node has no address that others could reach; give one"])


def _own_address(target: str) -> str | None:
    """This node's IPv4 address on the way to `target`, by the routing table; None without a way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
