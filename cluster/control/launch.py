"""Where a cluster keeps its files, and how a role process is started: plain data and paths.

<home>/<cluster>/config.yaml     the configuration as resolved by `up` (readable by its owner only: passwords)
<home>/<cluster>/cluster.json    what `up` started: Ray's address, and its process when it is ours
<home>/<cluster>/ray_token       Ray's access token
<home>/<cluster>/logs/<id>.log   output of each process
<home>/models                    downloaded models
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import twostroke
from twostroke.cluster.config import Config, dump_config, usable_threads
from twostroke.cluster.control.child import ChildSpec
from twostroke.cluster.control.supervisor import MemberRole
from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.ids import WorkerId

OWNER_MARK = "TWOSTROKE_CLUSTER_DIRECTORY"
"""Environment variable that marks a cluster's processes; nothing reads it but `local_ray.processes_of`."""
_NOT_INHERITED = ("RAY_", "PYTHONPATH", "OMP_", "CLUSTER_")


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What is running. `ray_pid` is 0 when Ray is not ours to stop."""

    ray_address: str
    ray_pid: int = 0
    ray_created_s: float = 0.0
    """Start time of that process: a pid alone may have been given to another since."""
    ray_directory: str = ""


@dataclass(frozen=True, slots=True)
class ClusterFiles:
    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    @property
    def record(self) -> Path:
        return self.directory / "cluster.json"

    @property
    def ray_token(self) -> Path:
        return self.directory / "ray_token"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def create(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)

    def write_config(self, text: str) -> None:
        write_private(self.config, text)

    def write_record(self, record: ClusterRecord) -> None:
        write_private(self.record, json.dumps(asdict(record)) + "\n")

    def read_record(self) -> ClusterRecord | None:
        """None when nothing was brought up here."""
        try:
            return ClusterRecord(**json.loads(self.record.read_text()))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise ConfigError([f"{self.record}: {error}"]) from None


def write_private(path: Path, text: str) -> None:
    """Replace `path` in one step; only its owner may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def package_root() -> str:
    """The directory that must be on a child's `sys.path`: the link farm's, or site-packages."""
    return str(Path(twostroke.__file__).parent.parent)


def child_environment(inherited: Mapping[str, str], directory: Path, threads: int) -> dict[str, str]:
    """`directory` marks the process and all below it as this cluster's. Ray sets OMP_NUM_THREADS for its workers,
    so the child's is set here. Two thread pools that spin starve each other on few cores, hence PASSIVE.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_INHERITED)}
    return kept | {
        OWNER_MARK: str(directory),
        "PYTHONPATH": package_root(),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "NUMBA_NUM_THREADS": str(threads),
    }


def ray_environment(files: ClusterFiles, ours: bool) -> dict[str, str]:
    """What Ray reads when it is imported. Our own Ray lets in only who can read its token."""
    usage = {"RAY_USAGE_STATS_ENABLED": "0"}
    return usage | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(files.ray_token)} if ours else {})


def run_command(role: str, config_path: Path, worker_id: str) -> tuple[str, ...]:
    """The command line of a role process; `{pipe}` stands for the descriptor of its keeper's socket."""
    module = (sys.executable, "-m", "twostroke.cluster.main")
    return (*module, "run", role, "--config", str(config_path), "--worker-id", worker_id, "--parent-pipe", "{pipe}")


def threads_of(config: Config, role: MemberRole) -> int:
    if role is MemberRole.PREFILL:
        return usable_threads(config.prefill.threads)
    return usable_threads(config.decode.threads) if role is MemberRole.DECODE else 1


def child_spec(
    config: Config, directory: Path, inherited: Mapping[str, str], worker_id: WorkerId, role: MemberRole, order: int
) -> ChildSpec:
    """How to start `worker_id` on this machine; writes the configuration that it reads."""
    files = ClusterFiles(directory)
    files.create()
    config_path = files.directory / f"config.{worker_id}.yaml"
    write_private(config_path, dump_config(_for_member(config, worker_id, role)))
    return ChildSpec(
        worker_id=worker_id,
        role=role.value,
        command=run_command(role.value, config_path, worker_id),
        environment=child_environment(inherited, directory, threads_of(config, role)),
        directory=directory,
        log_path=files.logs / f"{worker_id}.log",
        drain_s=config.ray.drain_s,
        backoff_s=config.ray.restart_backoff_s,
        max_backoff_s=config.ray.max_backoff_s,
        order=order,
    )


def _for_member(config: Config, worker_id: WorkerId, role: MemberRole) -> Config:
    """Routers after the first cannot share its ports on one machine: they take free ones."""
    if role is not MemberRole.ROUTER or worker_id == f"{MemberRole.ROUTER.value}-0":
        return config
    return config.model_copy(update={"router": config.router.model_copy(update={"http_port": 0, "grpc_port": 0})})


def gpu_share(num_gpus: float, num_workers: int) -> float:
    """How much of a GPU each worker asks Ray for: a whole one where they suffice, else an equal part."""
    if num_gpus <= 0 or num_workers <= 0:
        return 0.0
    return 1.0 if num_gpus >= num_workers else int(100 * num_gpus / num_workers) / 100


def worker_placement(config: Config, role: MemberRole, shared_gpus: float) -> dict[str, Any]:
    """Ray's options for where the host of a member runs; `shared_gpus` for a worker whose GPUs are not configured."""
    if role not in (MemberRole.PREFILL, MemberRole.DECODE):
        return {"num_gpus": 0}
    configured = config.ray.prefill_gpus if role is MemberRole.PREFILL else config.ray.decode_gpus
    placement: dict[str, Any] = {"num_gpus": shared_gpus if configured is None else configured}
    if config.ray.pool_resources:
        placement["resources"] = {f"twostroke-{role.value}": 1}
    return placement
