"""The inside of a role process: it says when it is ready, and leaves when its keeper goes.

run -> role starts -> on_ready: one JSON line to the keeper -> serves
SIGTERM, SIGINT, or the end of the keeper's socket -> `stop` is set -> the role drains -> exit 0
still here `drain_s + GRACE_S` after that -> exit 75, from a thread that no stuck event loop can hold up
"""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

log = structlog.get_logger(__name__)

GRACE_S = 5.0
EXIT_STUCK = 75
COLLECT_AFTER = (10_000, 20, 20)
"""Python collects after 700 new containers by itself."""

OnReady = Callable[[Mapping[str, Any]], None]
Role = Callable[[asyncio.Event, OnReady], Awaitable[None]]


def spare_start_up() -> None:
    """Take all that lives now out of the garbage collector's sight; the rest is looked at less often.

    A router with a vocabulary of 49,152 tokens stood still for 70 ms at each full collection, and spent 6 % of its CPU
    time on collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def run_role(role: Role, parent_pipe: int | None, drain_s: float) -> None:
    """Run `role(stop, on_ready)` until it ends. `on_ready` takes a flat record for the ready line.

    Raises whatever the role raises.
    """
    asyncio.run(_run(role, parent_pipe, drain_s))


async def _run(role: Role, parent_pipe: int | None, drain_s: float) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def leave(why: str) -> None:
        if stop.is_set():
            return
        log.info("draining", reason=why)
        watchdog = threading.Timer(drain_s + GRACE_S, os._exit, (EXIT_STUCK,))
        watchdog.daemon = True
        watchdog.start()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, signal.Signals(number).name)
    keeper = socket.socket(fileno=parent_pipe) if parent_pipe is not None else None
    if keeper is not None:
        os.set_inheritable(keeper.fileno(), False)
        keeper.setblocking(False)
        loop.add_reader(keeper, _on_keeper, loop, keeper, leave)

    def on_ready(record: Mapping[str, Any]) -> None:
        spare_start_up()
        line = json.dumps({"pid": os.getpid(), **record}) + "\n"
        if keeper is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        try:
            keeper.sendall(line.encode())
        except OSError as error:
            leave(f"the keeper cannot be told: {error}")

    await role(stop, on_ready)


def _on_keeper(loop: asyncio.AbstractEventLoop, keeper: socket.socket, leave: Callable[[str], None]) -> None:
    """The keeper never writes: readable means gone."""
    try:
        if keeper.recv(1):
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    loop.remove_reader(keeper)
    leave("the keeper has gone")
