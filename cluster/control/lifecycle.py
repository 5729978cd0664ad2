"""Bringing a cluster up and taking it down, for the CLI and the demo.

    up:    Ray (ours, or the one at `ray.address`) -> supervisor -> state server -> workers and routers ready
           -> with our own Ray: each router has attached to workers that serve
    down:  routers drain, workers drain, state server -> supervisor gone -> our Ray gone -> record removed

Each step that takes long is announced by `say`. Blocking; call it outside an event loop.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.cluster.config import Config, dump_config, load_stored
from twostroke.cluster.control import valkey
from twostroke.cluster.control.client import workers_ready
from twostroke.cluster.control.launch import ClusterFiles, ClusterRecord, ray_environment
from twostroke.cluster.control.local_ray import Say, is_alive, start_ray, stop_ray
from twostroke.cluster.control.supervisor import MemberRole, MemberState
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.state.base import PoolSizes

if TYPE_CHECKING:
    from twostroke.cluster.control.child import ChildView
    from twostroke.cluster.control.fleet import FleetStatus
    from twostroke.cluster.control.ray_app import RayClient

STOP_TIMEOUT_S = 20.0
POLL_S = 0.25


def up(config: Config, files: ClusterFiles, inherited: Mapping[str, str], say: Say, timeout_s: float) -> "FleetStatus":
    """Bring up what `config` says and wait until all of it is ready. On a running cluster: scale it to that.

    Raises Unavailable with the reason when a process cannot be brought up; what was started stays for `status`.
    """
    files.create()
    record = files.read_record()
    if record is not None and not is_alive(record):
        files.record.unlink()
        record = None
    embedded = not config.redis.url
    if record is None:
        if embedded:
            config = _at(config, valkey.new_url())
        config = _with_key(config, secrets.token_urlsafe(32))
        files.write_config(dump_config(config))
        record = start_ray(config, files, inherited, say)
    else:
        say("already up: scaling to the wanted sizes")
        running = load_stored(files.config)
        config = _with_key(_at(config, running.redis.url), running.router.budget.key)
    with connected(record, files, config.cluster) as client:
        say("starting the supervisor")
        client.ensure_supervisor(config, files, embedded_state=embedded, ours=bool(record.ray_pid))
        client.scale(PoolSizes(config.prefill.replicas, config.decode.replicas))
        deadline = time.monotonic() + timeout_s
        status = wait_settled(client, say, timeout_s)
    if record.ray_pid and config.decode.replicas:  # a Ray that we joined may have routers that we cannot reach
        for view in status.views:
            if view.role == MemberRole.ROUTER.value:
                wait_serving(view, config.prefill.replicas > 0, say, deadline)
    return status


def wait_serving(router: "ChildView", with_prefill: bool, say: Say, deadline: float) -> None:
    """Wait until the router is ready and, `with_prefill`, has a prefill worker. Raises Unavailable."""
    while (workers := workers_ready(router.ready["http"])) is None or (with_prefill and not workers[0]):
        if time.monotonic() > deadline:
            raise Unavailable(f"{router.worker_id} found no pair of workers that serves; log: {router.log_path}")
        say(f"waiting until {router.worker_id} has attached to the workers")
        time.sleep(POLL_S)


def _at(config: Config, redis_url: str) -> Config:
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis_url})})


def _with_key(config: Config, key: str) -> Config:
    """All routers sign continuation tokens with one key: `key`, unless the configuration has one."""
    budget = config.router.budget
    if budget.key or budget.key_file:
        return config
    router = config.router.model_copy(update={"budget": budget.model_copy(update={"key": key})})
    return config.model_copy(update={"router": router})


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
    config = load_stored(files.config)
    patience_s = config.ray.drain_s + STOP_TIMEOUT_S
    try:
        if is_alive(record):
            _drain(record, files, config, say)
            patience_s = 0.0
        else:
            say(f"Ray has gone: what it kept drains by itself (up to {config.ray.drain_s:g} s)")
    finally:
        stop_ray(record, files, patience_s, say)
    files.record.unlink(missing_ok=True)
    return True


def _drain(record: ClusterRecord, files: ClusterFiles, config: Config, say: Say) -> None:
    with connected(record, files, config.cluster) as client:
        say(f"draining (up to {config.ray.drain_s:g} s)")
        client.shutdown(3 * (config.ray.drain_s + STOP_TIMEOUT_S))


@contextmanager
def connected(record: ClusterRecord, files: ClusterFiles, cluster: str) -> "Iterator[RayClient]":
    os.environ.update(ray_environment(files, ours=bool(record.ray_pid)))
    from twostroke.cluster.control.ray_app import RayClient  # a second, and it reads the environment

    client = RayClient(record, files, cluster)
    try:
        yield client
    finally:
        client.close()
