"""Bringing a cluster up and taking it down, for the CLI and the demo.

    up:    Ray (ours, or the one at `ray.address`) -> supervisor -> state server -> workers and routers ready
    down:  routers drain, workers drain, state server -> supervisor gone -> our Ray gone -> record removed

Each step that takes long is announced by `say`. Blocking; call it outside an event loop.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from twostroke.cluster.config import Config, dump_config, load_config
from twostroke.cluster.control import valkey
from twostroke.cluster.control.launch import (
    ClusterFiles,
    ClusterRecord,
    child_environment,
    package_root,
    ray_environment,
    write_private,
)
from twostroke.cluster.control.supervisor import MemberState
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.state.base import PoolSizes

if TYPE_CHECKING:
    from twostroke.cluster.control.fleet import FleetStatus
    from twostroke.cluster.control.ray_app import RayClient

RAY_START_TIMEOUT_S = 90.0
RAY_STOP_TIMEOUT_S = 20.0
POLL_S = 0.25

Say = Callable[[str], None]


def up(config: Config, files: ClusterFiles, inherited: Mapping[str, str], say: Say, timeout_s: float) -> "FleetStatus":
    """Bring up what `config` says and wait until all of it is ready. On a running cluster: scale it to that.

    Raises Unavailable with the reason when a process cannot be brought up; what was started stays for `status`.
    """
    files.create()
    record = files.read_record()
    if record is not None and not _alive(record):
        files.record.unlink()
        record = None
    embedded = not config.redis.url
    if record is None:
        if embedded:
            config = _at(config, valkey.new_url())
        files.write_config(dump_config(config))
        record = start_ray(config, files, inherited, say)
    else:
        say("already up: scaling to the wanted sizes")
        config = _at(config, load_config(files.config).redis.url)
    with connected(record, files, config.cluster) as client:
        say("starting the supervisor")
        client.ensure_supervisor(config, files, embedded_state=embedded, ours=bool(record.ray_pid))
        client.scale(PoolSizes(config.prefill.replicas, config.decode.replicas))
        return wait_settled(client, say, timeout_s)


def _at(config: Config, redis_url: str) -> Config:
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis_url})})


def wait_settled(client: "RayClient", say: Say, timeout_s: float) -> "FleetStatus":
    """Wait until exactly the wanted processes are there and ready. Raises Unavailable with the reasons."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = client.status()
        if status.settled:
            return status
        ready = sum(view.state is MemberState.READY for view in status.views)
        waiting = [view.worker_id for view in status.views if view.state is not MemberState.READY]
        say(f"{ready} of {sum(status.desired.values())} processes ready; waiting for {', '.join(waiting) or 'a host'}")
        failed = [view for view in status.views if view.state is MemberState.FAILED]
        if failed or time.monotonic() > deadline:
            reasons = [
                f"{view.worker_id} is {view.state.value} ({view.last_end or 'no reason yet'}; log: {view.log_path})"
                for view in status.views
                if view.state is not MemberState.READY
            ]
            raise Unavailable("the cluster did not come up: " + "; ".join(reasons))
        time.sleep(POLL_S)


def down(files: ClusterFiles, say: Say) -> bool:
    """Drain and stop everything that `up` started. False when nothing was up. Raises Unavailable when processes
    are left over.
    """
    record = files.read_record()
    if record is None:
        return False
    left: list[int] = []
    if _alive(record):
        config = load_config(files.config)
        try:
            left = _drain(record, files, config, say)
        finally:
            stop_ray(record, say)
    else:
        say("Ray has gone: its processes drain by themselves")
        stop_ray(record, say)
    files.record.unlink(missing_ok=True)
    if left:
        raise Unavailable(f"processes are left over: {left}")
    return True


def _drain(record: ClusterRecord, files: ClusterFiles, config: Config, say: Say) -> list[int]:
    with connected(record, files, config.cluster) as client:
        pids = [view.pid for view in client.status().views if view.pid]
        say(f"draining {len(pids)} processes (up to {config.ray.drain_s:g} s)")
        client.shutdown(3 * (config.ray.drain_s + RAY_STOP_TIMEOUT_S))
    deadline = time.monotonic() + RAY_STOP_TIMEOUT_S
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


@contextmanager
def connected(record: ClusterRecord, files: ClusterFiles, cluster: str) -> "Iterator[RayClient]":
    os.environ.update(ray_environment(files, ours=bool(record.ray_pid)))
    from twostroke.cluster.control.ray_app import RayClient  # a second, and it reads the environment

    client = RayClient(record, files, cluster)
    try:
        yield client
    finally:
        client.close()


# ---------------------------------------------------------------------------------------------------- Ray


def start_ray(config: Config, files: ClusterFiles, inherited: Mapping[str, str], say: Say) -> ClusterRecord:
    """Join the Ray at `ray.address`, or start one that stays when this process ends."""
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
            env=child_environment(inherited, package_root(), threads=1) | ray_environment(files, ours=True),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + RAY_START_TIMEOUT_S
    try:
        while (started := files.read_record()) is None:
            if process.poll() is not None:
                raise Unavailable(f"Ray ended with exit code {process.returncode}; log: {files.logs / 'ray.log'}")
            if time.monotonic() > deadline:
                raise Unavailable(f"Ray did not start within {RAY_START_TIMEOUT_S:g} s; log: {files.logs / 'ray.log'}")
            time.sleep(POLL_S)
    except BaseException:
        _end_tree(process.pid)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return started


def stop_ray(record: ClusterRecord, say: Say) -> None:
    """End our Ray and its processes. One that we joined is left alone."""
    if not record.ray_pid:
        return
    if _alive(record):
        say("stopping Ray")
        _end_tree(record.ray_pid)
    shutil.rmtree(record.ray_directory, ignore_errors=True)


def _alive(record: ClusterRecord) -> bool:
    """A Ray that we joined is taken to be there: connecting tells."""
    if not record.ray_pid:
        return True
    try:
        process = psutil.Process(record.ray_pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record.ray_created_s) < 1.0
    except psutil.NoSuchProcess:
        return False


def _end_tree(pid: int) -> None:
    """SIGTERM to the keeper, which ends its children; then kill what stays. Ray's agents notice late by themselves."""
    try:
        keeper = psutil.Process(pid)
        tree = [keeper, *keeper.children(recursive=True)]
        keeper.terminate()
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(tree, timeout=RAY_STOP_TIMEOUT_S / 4)
    for process in left:
        process.terminate()
    _, left = psutil.wait_procs(left, timeout=RAY_STOP_TIMEOUT_S / 4)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=RAY_STOP_TIMEOUT_S)
