"""The keeper of one process, with real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from tests import waiting
from twostroke.cluster.control.child import ChildKeeper, ChildSpec
from twostroke.cluster.control.fleet import Fleet, LocalHosts
from twostroke.cluster.control.launch import child_environment
from twostroke.cluster.control.supervisor import MemberRole, MemberState
from twostroke.cluster.core.errors import InvalidRequest, Unavailable
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.state.base import PoolSizes
from twostroke.cluster.state.memory import MemoryDesiredSizes

SCRIPT = Path(__file__).parents[2] / "control_script.py"
DEADLINE_S = 30.0


def spec(directory: Path, mode: str, worker_id: str = "decode-0", role: str = "decode", order: int = 0) -> ChildSpec:
    return ChildSpec(
        worker_id=WorkerId(worker_id),
        role=role,
        command=(sys.executable, str(SCRIPT), mode, "{pipe}"),
        environment=child_environment(os.environ, directory, threads=1),
        directory=directory,
        log_path=directory / "logs" / f"{worker_id}.log",
        drain_s=0.5,
        backoff_s=0.01,
        max_backoff_s=0.02,
        order=order,
    )


async def until(condition: Callable[[], bool]) -> None:
    await waiting.until(condition, DEADLINE_S)


def state_of(keeper: ChildKeeper) -> MemberState:
    return keeper.view().state


async def test_ready_then_killed_then_replaced_then_drained(tmp_path: Path) -> None:
    keeper = ChildKeeper(spec(tmp_path, "serve"))
    keeper.start()
    await until(lambda: state_of(keeper) is MemberState.READY)
    first = keeper.view()
    assert first.ready["pid"] == first.pid
    assert first.rss_bytes > 0

    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: keeper.view().restarts == 1 and state_of(keeper) is MemberState.READY)
    second = keeper.view()
    assert second.pid != first.pid
    assert second.last_end.startswith("killed by SIGKILL")

    await keeper.stop()
    assert state_of(keeper) is MemberState.STOPPED
    assert not psutil.pid_exists(second.pid)


async def test_gives_up_on_a_process_that_cannot_start_and_says_why(tmp_path: Path) -> None:
    keeper = ChildKeeper(spec(tmp_path, "crash"))
    keeper.start()
    await until(lambda: state_of(keeper) is MemberState.FAILED)
    assert keeper.view().last_end == "exit code 1: cannot find the weights"
    await keeper.stop()
    assert state_of(keeper) is MemberState.STOPPED


async def test_a_process_that_does_not_drain_ends_by_its_own_watchdog(tmp_path: Path) -> None:
    keeper = ChildKeeper(spec(tmp_path, "stubborn"))
    keeper.start()
    await until(lambda: state_of(keeper) is MemberState.READY)
    await keeper.stop()
    assert keeper.view().last_end.startswith("exit code 75")


async def test_a_child_leaves_when_its_keeper_dies(tmp_path: Path) -> None:
    environment = child_environment(os.environ, tmp_path, threads=1)
    command = [sys.executable, str(SCRIPT), "keep-and-die", str(tmp_path)]
    keeper = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await keeper.communicate()
    child = int(output)
    await until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert "the keeper has gone" in (tmp_path / "child.log").read_text()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    def specify(worker_id: WorkerId, role: MemberRole, order: int) -> ChildSpec:
        return spec(tmp_path, "serve", worker_id, role.value, order)

    fleet = Fleet(LocalHosts(specify), MemoryDesiredSizes(), routers=1, embedded_state=True)
    yield fleet
    assert await fleet.shutdown(DEADLINE_S)
    assert fleet.status().views == ()


async def settle(fleet: Fleet) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await fleet.tick()
            if fleet.status().settled:
                return
            await asyncio.sleep(0.01)


def ids(fleet: Fleet) -> list[str]:
    return [view.worker_id for view in fleet.status().views]


async def test_a_fleet_comes_up_scales_drains_and_goes(fleet: Fleet) -> None:
    await fleet.scale(PoolSizes(1, 2))
    await settle(fleet)
    assert ids(fleet) == ["state-0", "decode-0", "decode-1", "prefill-0", "router-0"]

    await fleet.scale(PoolSizes(2, 1))
    await settle(fleet)
    assert ids(fleet) == ["state-0", "decode-0", "prefill-0", "prefill-1", "router-0"]

    await fleet.drain(WorkerId("prefill-0"))
    await settle(fleet)
    assert ids(fleet) == ["state-0", "decode-0", "prefill-1", "router-0"]
    with pytest.raises(InvalidRequest, match="no worker"):
        await fleet.drain(WorkerId("prefill-9"))
    with pytest.raises(InvalidRequest, match="state server"):
        await fleet.drain(WorkerId("state-0"))


async def test_desired_sizes_follow_the_store_and_survive_its_loss(tmp_path: Path) -> None:
    store = MemoryDesiredSizes()
    fleet = Fleet(LocalHosts(lambda *_: spec(tmp_path, "serve")), store, routers=0, embedded_state=False)
    await fleet.scale(PoolSizes(1, 3))
    await fleet.sync_sizes()
    assert await store.get() == PoolSizes(1, 3)

    await store.set(PoolSizes(2, 4))  # an autoscaler writes
    await fleet.sync_sizes()
    assert fleet.status().desired[MemberRole.DECODE] == 4

    forgetful = MemoryDesiredSizes()  # the store came back empty
    fleet._store = forgetful
    await fleet.sync_sizes()
    await fleet.sync_sizes()
    assert await forgetful.get() == PoolSizes(2, 4)


class LostSizes(MemoryDesiredSizes):
    """A store that cannot be reached."""

    async def get(self) -> PoolSizes | None:
        raise Unavailable("the store is away")


async def test_a_new_life_adopts_what_it_finds_and_drains_nobody_for_a_size_it_does_not_know(tmp_path: Path) -> None:
    store = MemoryDesiredSizes()
    hosts = LocalHosts(lambda worker_id, role, order: spec(tmp_path, "serve", worker_id, role.value, order))
    first = Fleet(hosts, store, routers=1, embedded_state=True)
    await first.scale(PoolSizes(2, 2))
    await settle(first)
    before = {view.worker_id: view.pid for view in first.status().views}

    for sizes in (LostSizes(), MemoryDesiredSizes()):  # away; there, but it has forgotten
        second = Fleet(hosts, sizes, routers=1, embedded_state=True)
        await second.adopt()
        await second.tick()
        assert second.status().settled
        assert {view.worker_id: view.pid for view in second.status().views} == before

    await store.set(PoolSizes(1, 3))  # while no supervisor lived
    third = Fleet(hosts, store, routers=1, embedded_state=True)
    await third.adopt()
    await settle(third)
    after = {view.worker_id: view.pid for view in third.status().views}
    assert set(after) == set(before) - {"prefill-1"} | {"decode-2"}
    assert {worker_id: pid for worker_id, pid in before.items() if worker_id != "prefill-1"}.items() < after.items()
    assert await third.shutdown(DEADLINE_S)
