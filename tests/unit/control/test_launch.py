"""How role processes are started."""

import stat
from pathlib import Path

from twostroke.cluster.config import Config, load_config, parse_config
from twostroke.cluster.control.launch import (
    ClusterFiles,
    ClusterRecord,
    child_environment,
    child_spec,
    gpu_share,
    package_root,
    worker_placement,
)
from twostroke.cluster.control.supervisor import MemberRole
from twostroke.cluster.core.ids import WorkerId


def test_a_child_gets_its_own_threads_and_path_and_nothing_of_ray() -> None:
    inherited = {"HOME": "/h", "OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "PYTHONPATH": "/elsewhere"}
    environment = child_environment(inherited, Path("/state/local"), threads=3)
    assert environment["HOME"] == "/h"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["PYTHONPATH"] == package_root()
    assert not [name for name in environment if name.startswith("RAY_")]


def test_a_spec_writes_a_private_configuration_that_reads_back(tmp_path: Path) -> None:
    config = Config()
    spec = child_spec(config, tmp_path, {}, WorkerId("decode-1"), MemberRole.DECODE, order=4)
    path = Path(spec.command[spec.command.index("--config") + 1])
    assert load_config(path) == config
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert spec.order == 4


def test_only_the_first_router_takes_the_configured_ports(tmp_path: Path) -> None:
    ports = []
    for index in range(2):
        child_spec(Config(), tmp_path, {}, WorkerId(f"router-{index}"), MemberRole.ROUTER, index)
        ports.append(load_config(tmp_path / f"config.router-{index}.yaml").router.http_port)
    assert ports == [Config().router.http_port, 0]


def test_the_record_reads_back(tmp_path: Path) -> None:
    files = ClusterFiles(tmp_path / "local")
    files.create()
    assert files.read_record() is None
    record = ClusterRecord("10.0.0.1:6379", 12, 3.5, "/tmp/x")
    files.write_record(record)
    assert files.read_record() == record


def test_gpus_are_whole_where_they_suffice_and_shared_where_not() -> None:
    assert gpu_share(0, 4) == 0.0
    assert gpu_share(4, 4) == 1.0
    assert gpu_share(1, 2) == 0.5
    assert gpu_share(1, 3) == 0.33


def test_a_worker_goes_where_its_pools_resource_is_with_the_gpus_configured() -> None:
    config = parse_config({"ray": {"pool_resources": True, "decode_gpus": 1}})
    prefill, decode = (worker_placement(config, role, 0.5) for role in (MemberRole.PREFILL, MemberRole.DECODE))
    assert prefill == {"num_gpus": 0.5, "resources": {"twostroke-prefill": 1}}
    assert decode == {"num_gpus": 1, "resources": {"twostroke-decode": 1}}
    assert worker_placement(config, MemberRole.ROUTER, 0.5) == {"num_gpus": 0}
    assert worker_placement(Config(), MemberRole.DECODE, 0.5) == {"num_gpus": 0.5}
