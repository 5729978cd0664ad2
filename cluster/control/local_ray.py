"""A Ray of our own on this machine, and what is left of it: processes, without importing Ray.

    start_ray: token -> `ray-keeper` process (its own session; it outlives the CLI) -> it writes the record
    stop_ray:  SIGTERM to the keeper -> everything that carries the cluster's mark ends, or is ended

A mark in the environment finds every process of a cluster, whoever its parent became; a pid file could not.
"""

import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from twostroke.cluster.config import Config
from twostroke.cluster.control.launch import (
    OWNER_MARK,
    ClusterFiles,
    ClusterRecord,
    child_environment,
    ray_environment,
    write_private,
)
from twostroke.cluster.core.errors import Unavailable

START_TIMEOUT_S = 90.0
TERMINATE_TIMEOUT_S = 5.0
POLL_S = 0.25

Say = Callable[[str], None]


def start_ray(config: Config, files: ClusterFiles, inherited: Mapping[str, str], say: Say) -> ClusterRecord:
    """Join the Ray at `ray.address`, or start one that stays when this process ends. Raises Unavailable."""
    if config.ray.address:
        record = ClusterRecord(config.ray.address)
        files.write_record(record)
        return record
    say("starting Ray (about 10 s)")
    write_private(files.ray_token, secrets.token_hex(32))
    # Ray's socket paths must stay under 108 bytes, so they cannot live in the state directory.
    temporary = Path(tempfile.mkdtemp(prefix="twostroke-ray-"))
    command = [sys.executable, "-m", "twostroke.cluster.main", "ray-keeper", str(files.directory), str(temporary)]
    with (files.logs / "ray.log").open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=files.directory,
            env=child_environment(inherited, files.directory, threads=1) | ray_environment(files, ours=True),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _wait_for_record(process, files)
    except BaseException:
        _end(processes_of(files))
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _wait_for_record(process: "subprocess.Popen[bytes]", files: ClusterFiles) -> ClusterRecord:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (record := files.read_record()) is None:
        if process.poll() is not None:
            raise Unavailable(f"Ray ended with exit code {process.returncode}; log: {files.logs / 'ray.log'}")
        if time.monotonic() > deadline:
            raise Unavailable(f"Ray did not start within {START_TIMEOUT_S:g} s; log: {files.logs / 'ray.log'}")
        time.sleep(POLL_S)
    return record


def stop_ray(record: ClusterRecord, files: ClusterFiles, patience_s: float, say: Say) -> None:
    """End our Ray; then wait `patience_s` for the cluster's processes, and end those that stay. A Ray that we
    joined is left alone. Raises Unavailable for processes that cannot be ended.
    """
    if record.ray_pid and is_alive(record):
        say("stopping Ray")
        keeper = psutil.Process(record.ray_pid)
        keeper.terminate()
        psutil.wait_procs([keeper], timeout=TERMINATE_TIMEOUT_S)
    psutil.wait_procs(_without_ray(processes_of(files)), timeout=patience_s)
    _end(processes_of(files))  # for Ray's agents, too: left alone, they notice only after a while
    if record.ray_directory:
        shutil.rmtree(record.ray_directory, ignore_errors=True)
    if left := processes_of(files):
        raise Unavailable(f"processes are left over: {[process.pid for process in left]}")


def is_alive(record: ClusterRecord) -> bool:
    """A Ray that we joined is taken to be there: connecting tells."""
    if not record.ray_pid:
        return True
    try:
        process = psutil.Process(record.ray_pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record.ray_created_s) < 1.0
    except psutil.NoSuchProcess:
        return False


def processes_of(files: ClusterFiles) -> list[psutil.Process]:
    """Live processes of this cluster."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _is_of(process, files):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _is_of(process: psutil.Process, files: ClusterFiles) -> bool:
    """By the mark; Ray's titled processes have overwritten their environment, but work in the directory."""
    if process.environ().get(OWNER_MARK) == str(files.directory):
        return True
    return _is_titled_by_ray(process) and process.cwd() == str(files.directory.resolve())


def _is_titled_by_ray(process: psutil.Process) -> bool:
    return process.cmdline()[:1] != [] and process.cmdline()[0].startswith("ray::")


def _without_ray(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Role processes: only these have anything to drain."""
    found: list[psutil.Process] = []
    for process in processes:
        try:
            if not _is_titled_by_ray(process) and "RAY_AUTH_MODE" not in process.environ():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _end(processes: list[psutil.Process]) -> None:
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            try:
                stop(process)
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=TERMINATE_TIMEOUT_S)
