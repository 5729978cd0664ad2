"""One role process and its keeper: start, watch, restart, drain.

    start -> STARTING -> ready line -> READY -> the process ends -> BACKOFF -> STARTING ...
    stop  -> DRAINING -> the process ends -> STOPPED
    MAX_FAST_ENDS ends in a row, each within STEADY_S of its start -> FAILED (nothing runs; `stop` still works)

Keeper and child share a socket pair. The child writes one JSON line when it is ready; the end of the socket
tells it that its keeper has gone, and it drains and exits. It runs in a session of its own, so that neither
Ctrl-C nor Ray's clean-up of a dead actor's process group reaches it. Its output goes to a log file, not to a
pipe: it outlives the keeper without a broken pipe.
"""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.control.supervisor import MemberState
from twostroke.cluster.core.ids import WorkerId

log = structlog.get_logger(__name__)

MAX_FAST_ENDS = 8
STEADY_S = 30.0
KILL_GRACE_S = 10.0
"""Beyond the drain time, before SIGKILL."""
READY_LINE_BYTES = 1 << 16
MAX_LOG_BYTES = 16 << 20
"""A larger log is moved to `<name>.1` when the process starts anew."""
REASON_LINES = 3
REASON_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ChildSpec:
    worker_id: WorkerId
    role: str
    command: tuple[str, ...]
    """`{pipe}` in it is replaced by the number of the inherited descriptor."""
    environment: Mapping[str, str]
    directory: Path
    log_path: Path
    drain_s: float
    backoff_s: float
    max_backoff_s: float
    order: int = 0
    """Larger is newer; for choosing who leaves first."""


@dataclass(frozen=True, slots=True)
class ChildView:
    """What an operator sees of one process. `ready` is its ready line, empty before it came."""

    worker_id: WorkerId
    role: str
    state: MemberState
    pid: int
    restarts: int
    last_end: str
    """Why the last life ended; empty in the first."""
    rss_bytes: int
    log_path: str
    order: int = 0
    ready: Mapping[str, Any] = field(default_factory=dict)


class ChildKeeper:
    """Owns one child process. Use on one event loop; `stop` once, at the end."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._state = MemberState.STARTING
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Mapping[str, Any] = {}
        self._restarts = 0
        self._fast_ends = 0
        self._last_end = ""
        self._stop = asyncio.Event()
        self._tasks = TaskOwner(f"keeper.{spec.worker_id}", self._keeper_failed)
        self._task: asyncio.Task[object] | None = None

    def start(self) -> None:
        """Call once."""
        self._task = self._tasks.spawn(self._keep(), "keep")

    def view(self) -> ChildView:
        pid = self._process.pid if self._process is not None else 0
        return ChildView(
            self._spec.worker_id,
            self._spec.role,
            self._state,
            pid,
            self._restarts,
            self._last_end,
            _resident_bytes(pid),
            str(self._spec.log_path),
            self._spec.order,
            self._ready,
        )

    def request_stop(self) -> None:
        """Begin to drain; returns at once. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            if self._state is not MemberState.STOPPED:
                self._state = MemberState.DRAINING

    async def stop(self) -> None:
        """Drain and wait for the end of the process: `drain_s + KILL_GRACE_S` at most, then it is killed."""
        self.request_stop()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=self._spec.drain_s + 2 * KILL_GRACE_S)

    def _keeper_failed(self, name: str, error: BaseException) -> None:
        self._state = MemberState.FAILED
        self._last_end = f"its keeper failed: {error!r}"

    # ------------------------------------------------------------------------------------------- lives

    async def _keep(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            await self._live_once()
            if self._stop.is_set():
                break
            self._restarts += 1
            self._fast_ends = self._fast_ends + 1 if time.monotonic() - started < STEADY_S else 1
            log.warning("child_ended", worker_id=self._spec.worker_id, reason=self._last_end, restarts=self._restarts)
            if self._fast_ends >= MAX_FAST_ENDS:
                self._state = MemberState.FAILED
                await self._stop.wait()
                break
            self._state = MemberState.BACKOFF
            delay_s = min(self._spec.backoff_s * 2 ** (self._fast_ends - 1), self._spec.max_backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)
        self._state = MemberState.STOPPED

    async def _live_once(self) -> None:
        self._state = MemberState.STARTING
        self._ready = {}
        ours, theirs = socket.socketpair()
        try:
            log_start, process = await asyncio.to_thread(_spawn, self._spec, theirs)
        except OSError as error:
            self._last_end = f"cannot start: {error}"
            ours.close()
            return
        finally:
            theirs.close()
        self._process = process
        reader, writer = await asyncio.open_connection(sock=ours, limit=READY_LINE_BYTES)
        ended = self._tasks.spawn(asyncio.to_thread(process.wait), "wait")
        hearing = self._tasks.spawn(self._hear_ready(reader), "ready")
        stopping = self._tasks.spawn(self._stop.wait(), "stop")
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._end(process, ended)
        finally:
            hearing.cancel()
            stopping.cancel()
            writer.close()
            self._process = None
        tail = await asyncio.to_thread(_tail, self._spec.log_path, log_start)
        self._last_end = _describe_end(process.returncode, tail)

    async def _hear_ready(self, reader: asyncio.StreamReader) -> None:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            return
        self._ready = json.loads(line)
        if self._state is MemberState.STARTING:
            self._state = MemberState.READY

    async def _end(self, process: subprocess.Popen[bytes], ended: asyncio.Task[object]) -> None:
        process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait({ended}, timeout=self._spec.drain_s + KILL_GRACE_S)
        if not done:
            log.error("child_killed", worker_id=self._spec.worker_id, reason="it did not end within its drain time")
            process.kill()
            await asyncio.wait({ended}, timeout=KILL_GRACE_S)


def _spawn(spec: ChildSpec, theirs: socket.socket) -> tuple[int, subprocess.Popen[bytes]]:
    """Start the process; also returns where in the log its output begins."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    if spec.log_path.exists() and spec.log_path.stat().st_size > MAX_LOG_BYTES:
        spec.log_path.replace(spec.log_path.with_name(spec.log_path.name + ".1"))
    with spec.log_path.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [part.replace("{pipe}", str(theirs.fileno())) for part in spec.command],
            cwd=spec.directory,
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return log_start, process


def _tail(path: Path, start: int) -> str:
    """The last non-empty lines that this life wrote, as one line."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(start, file.tell() - REASON_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(deque((line.strip() for line in text.splitlines() if line.strip()), maxlen=REASON_LINES))


def _describe_end(returncode: int | None, tail: str) -> str:
    if returncode is None:
        how = "did not end when killed"
    elif returncode < 0:
        how = f"killed by {signal.Signals(-returncode).name}"
    else:
        how = f"exit code {returncode}"
    return f"{how}: {tail}" if tail else how


def _resident_bytes(pid: int) -> int:
    if not pid:
        return 0
    try:
        process = psutil.Process(pid)
        return sum(part.memory_info().rss for part in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0
