"""Everything that touches Ray: its processes, the supervisor actor and the host actors.

    twostroke up ── starts ──> Ray's keeper process (`run ray`: GCS, raylet, agents; stays when the CLI leaves)
                 ── creates ─> supervisor actor (detached, named): control.fleet's loop
                                  └─ creates ─> host actor a worker and router (detached, named)
                                                  └─ keeps ─> `twostroke run <role>`: the process that serves

Ray is the control plane only. A host actor's end closes its child's pipe, and the child drains; the supervisor
then starts another host. The supervisor's end changes nothing for the others; Ray starts it again, and it adopts
the hosts that it finds. Ray reads its environment when it is imported: import this module only after
`launch.ray_environment` was applied.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import structlog
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.config import Config, parse_config
from twostroke.cluster.control.child import ChildKeeper, ChildView
from twostroke.cluster.control.fleet import Fleet, FleetStatus, HostLost, pending_view
from twostroke.cluster.control.launch import (
    ClusterFiles,
    ClusterRecord,
    child_spec,
    gpu_share,
    package_root,
    worker_placement,
)
from twostroke.cluster.control.supervisor import MemberRole, role_of
from twostroke.cluster.core.errors import TwostrokeError, Unavailable
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.state.base import PoolSizes
from twostroke.cluster.state.redis import RedisClient, RedisDesiredSizes

log = structlog.get_logger(__name__)

SUPERVISOR = "supervisor"
HOST_PREFIX = "host:"
LOCAL_CPUS = 64
"""What a local Ray believes to have: actors only count, their children do the work."""
ACTOR_CPUS = 0.01
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least; nothing of ours goes through it."""
CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 60.0
SHUTDOWN_MARGIN_S = 20.0
ASK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the supervisor needs, also in its next life on another machine."""

    config: Mapping[str, Any]
    """As plain data: it must not depend on the version of pydantic on the other side."""
    directory: str
    embedded_state: bool
    gpus_per_worker: float
    python_path: str
    """Set for actors on a Ray that is not ours; empty otherwise (our Ray inherited it)."""


def _namespace(cluster: str) -> str:
    return f"twostroke-{cluster}"


# ------------------------------------------------------------------------------------------------- actors


class Host:
    """Keeps one role process. Ray runs its methods on one event loop."""

    def __init__(self, plan: Plan, worker_id: WorkerId, role: MemberRole, order: int) -> None:
        config = parse_config(plan.config)
        spec = child_spec(config, Path(plan.directory), os.environ, worker_id, role, order)
        self._keeper = ChildKeeper(spec)
        self._keeper.start()

    async def view(self) -> ChildView:
        return self._keeper.view()

    async def request_stop(self) -> None:
        self._keeper.request_stop()


class RayHosts:
    """Implements `fleet.Hosts` with actors."""

    def __init__(self, plan: Plan, namespace: str) -> None:
        self._plan = plan
        self._namespace = namespace
        self._actors: dict[WorkerId, Any] = {}
        self._pending: dict[WorkerId, ChildView] = {}

    async def existing(self) -> list[ChildView]:
        names = await asyncio.to_thread(ray.util.list_named_actors)
        found = await asyncio.gather(*(self._adopt(name) for name in names if name.startswith(HOST_PREFIX)))
        return [view for view in found if view is not None]

    async def _adopt(self, name: str) -> ChildView | None:
        """None for a host that has died."""
        worker_id = WorkerId(name.removeprefix(HOST_PREFIX))
        try:
            self._actors[worker_id] = await asyncio.to_thread(ray.get_actor, name, self._namespace)
            self._pending[worker_id] = pending_view(worker_id, role_of(worker_id), 0)
            return await self.view(worker_id)
        except (ValueError, HostLost) as error:
            log.warning("host_not_adopted", worker_id=worker_id, reason=repr(error))
            return None

    async def start(self, worker_id: WorkerId, role: MemberRole, order: int) -> None:
        placement = worker_placement(parse_config(self._plan.config), role, self._plan.gpus_per_worker)
        named = {"name": HOST_PREFIX + worker_id, "namespace": self._namespace, "max_restarts": 0}
        options = _actor_options(self._plan.python_path) | placement | named
        try:
            self._actors[worker_id] = ray.remote(Host).options(**options).remote(self._plan, worker_id, role, order)
        except (ValueError, RayError) as error:  # the name of a host that has just died is not free at once
            raise Unavailable(f"cannot start a host for {worker_id}: {error}") from None
        self._pending[worker_id] = pending_view(worker_id, role, order)

    async def view(self, worker_id: WorkerId) -> ChildView:
        try:
            view: ChildView = await self._call(worker_id, "view")
        except TimeoutError:
            return self._pending[worker_id]  # not placed yet, or slow: as last seen
        self._pending[worker_id] = view
        return view

    async def drain(self, worker_id: WorkerId) -> None:
        try:
            await self._call(worker_id, "request_stop")
        except TimeoutError:
            raise Unavailable(f"the host of {worker_id} does not answer") from None

    async def forget(self, worker_id: WorkerId) -> None:
        actor = self._actors.pop(worker_id, None)
        self._pending.pop(worker_id, None)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    async def _call(self, worker_id: WorkerId, method: str) -> Any:
        actor = self._actors.get(worker_id)
        if actor is None:
            raise HostLost(f"no host for {worker_id}")
        try:
            return await asyncio.wait_for(getattr(actor, method).remote(), CALL_TIMEOUT_S)
        except ActorUnavailableError as error:
            raise TimeoutError(str(error)) from None
        except RayActorError as error:
            raise HostLost(f"its host actor died: {error}") from None


class Supervisor:
    """The detached actor around `Fleet`. Ray restarts it; a new life adopts what the old one started."""

    def __init__(self, plan: Plan) -> None:
        config = parse_config(plan.config)
        self._drain_s = config.ray.drain_s
        self._redis = RedisClient.from_config(config)
        self._fleet = Fleet(
            RayHosts(plan, _namespace(config.cluster)),
            RedisDesiredSizes(self._redis),
            routers=config.router.replicas,
            embedded_state=plan.embedded_state,
        )
        self._adopted = asyncio.Event()
        self._tasks = TaskOwner(SUPERVISOR, self._loop_failed)
        self._loop = self._tasks.spawn(self._run(), "fleet")

    async def _run(self) -> None:
        await self._fleet.adopt()
        self._adopted.set()
        await self._fleet.run()

    async def _ready(self) -> Fleet:
        """The fleet, once it knows what an earlier life left."""
        await self._adopted.wait()  # bounded: adoption ends, or this process does
        return self._fleet

    def _loop_failed(self, name: str, error: BaseException) -> None:
        os._exit(1)  # Ray starts the actor again, and it adopts its hosts

    async def status(self) -> FleetStatus:
        return (await self._ready()).status()

    async def scale(self, sizes: PoolSizes) -> None:
        await (await self._ready()).scale(sizes)

    async def drain(self, worker_id: WorkerId) -> None:
        await (await self._ready()).drain(worker_id)

    async def shutdown(self) -> bool:
        """Drain everything; True when nothing is left. The actor is of no use afterwards."""
        fleet = await self._ready()
        self._loop.cancel()
        empty = await fleet.shutdown(self._drain_s + SHUTDOWN_MARGIN_S)
        await self._redis.close()
        return empty


def _actor_options(python_path: str) -> dict[str, Any]:
    options: dict[str, Any] = {"lifetime": "detached", "num_cpus": ACTOR_CPUS, "max_concurrency": 16}
    if python_path:
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": python_path}}
    return options


# ------------------------------------------------------------------------------------------------- client


class RayClient:
    """The CLI's connection. It moves the process to the cluster's directory: Ray puts a driver's working directory
    on the workers' `sys.path`, where the repository's `proto/` and `kernels/` would hide packages of these names.
    """

    def __init__(self, record: ClusterRecord, files: ClusterFiles, cluster: str) -> None:
        """Raises Unavailable."""
        self._namespace = _namespace(cluster)
        os.chdir(files.directory)
        try:
            ray.init(address=record.ray_address, namespace=self._namespace, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise Unavailable(f"cannot reach Ray at {record.ray_address}: {error}") from None

    def ensure_supervisor(self, config: Config, files: ClusterFiles, *, embedded_state: bool, ours: bool) -> bool:
        """Create the supervisor; False when there was one."""
        try:
            ray.get_actor(SUPERVISOR, self._namespace)
            return False
        except ValueError:
            pass
        gpus = 0.0 if config.model.fake else float(ray.cluster_resources().get("GPU", 0))
        workers = config.prefill.replicas + config.decode.replicas
        plan = Plan(
            config.model_dump(mode="json"),
            str(files.directory),
            embedded_state,
            gpu_share(gpus, workers),
            "" if ours else package_root(),
        )
        options = _actor_options(plan.python_path) | {"name": SUPERVISOR, "max_restarts": -1}
        ray.remote(Supervisor).options(**options).remote(plan)
        return True

    def status(self) -> FleetStatus:
        status: FleetStatus = self._ask("status", CONNECT_TIMEOUT_S)
        return status

    def scale(self, sizes: PoolSizes) -> None:
        self._ask("scale", CONNECT_TIMEOUT_S, sizes)

    def drain(self, worker_id: WorkerId) -> None:
        self._ask("drain", CONNECT_TIMEOUT_S, worker_id)

    def shutdown(self, timeout_s: float) -> bool:
        """Drain all processes, then remove the supervisor. True when nothing was left over."""
        try:
            empty: bool = self._ask("shutdown", timeout_s)
        finally:
            for name in ray.util.list_named_actors():
                ray.kill(ray.get_actor(name, self._namespace))
        return empty

    def close(self) -> None:
        ray.shutdown()

    def _ask(self, method: str, timeout_s: float, *arguments: object) -> Any:
        """Raises Unavailable, or what the supervisor refused with. While Ray starts it anew it is asked again: its
        methods are idempotent.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                actor = ray.get_actor(SUPERVISOR, self._namespace)
                left_s = max(0.0, deadline - time.monotonic())
                return ray.get(getattr(actor, method).remote(*arguments), timeout=left_s)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, TwostrokeError):
                    raise error.cause from None
                raise
            except (ValueError, RayError) as error:
                if not isinstance(error, RayActorError) or time.monotonic() > deadline:
                    raise Unavailable(f"the supervisor does not answer: {error}") from None
            time.sleep(ASK_AGAIN_S)


# ------------------------------------------------------------------------------------------- Ray's keeper


def keep_ray(files: ClusterFiles, temporary: Path) -> None:
    """Start a Ray of our own, record it, and keep it until SIGTERM or SIGINT. Runs in a process of its own."""
    stop = threading.Event()
    ray.init(
        include_dashboard=False,
        num_cpus=LOCAL_CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=str(temporary),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    us = psutil.Process()
    files.write_record(ClusterRecord(ray.get_runtime_context().gcs_address, us.pid, us.create_time(), str(temporary)))
    stop.wait()
    ray.shutdown()
