"""The embedded state server as a role process, as `up` starts it."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests import waiting
from twostroke.cluster.config import Config
from twostroke.cluster.control import valkey
from twostroke.cluster.control.child import ChildKeeper
from twostroke.cluster.control.launch import child_spec
from twostroke.cluster.control.supervisor import MemberRole, MemberState
from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.state.base import PoolSizes
from twostroke.cluster.state.redis import RedisClient, RedisDesiredSizes

DEADLINE_S = 30.0
pytestmark = pytest.mark.redis


def config_at(url: str, backoff_s: float = 0.2) -> Config:
    defaults = Config()
    return defaults.model_copy(
        update={
            "redis": defaults.redis.model_copy(update={"url": url}),
            "ray": defaults.ray.model_copy(update={"drain_s": 5.0, "restart_backoff_s": backoff_s}),
        }
    )


async def test_serves_with_a_password_restarts_at_its_address_and_leaves_no_server(tmp_path: Path) -> None:
    config = config_at(valkey.new_url())
    keeper = ChildKeeper(child_spec(config, tmp_path, os.environ, WorkerId("state-0"), MemberRole.STATE, 0))
    keeper.start()
    await waiting.until(lambda: keeper.view().state is MemberState.READY, DEADLINE_S)
    wrapper = psutil.Process(keeper.view().pid)
    (server,) = wrapper.children()
    assert "requirepass" not in " ".join(server.cmdline())

    client = RedisClient.from_config(config)
    sizes = RedisDesiredSizes(client)
    await sizes.set(PoolSizes(1, 2))
    assert await sizes.get() == PoolSizes(1, 2)

    os.kill(wrapper.pid, signal.SIGKILL)
    await waiting.until(lambda: keeper.view().restarts >= 1, DEADLINE_S)
    await waiting.until(lambda: not server.is_running(), DEADLINE_S)
    await waiting.until(lambda: keeper.view().state is MemberState.READY, DEADLINE_S)
    assert await sizes.get() is None  # hints only: a restart forgets them
    await client.close()

    (server,) = psutil.Process(keeper.view().pid).children()
    await keeper.stop()
    assert not server.is_running()


async def test_a_taken_port_is_an_error_that_names_it(tmp_path: Path) -> None:
    holder = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = holder.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match="valkey-server ended"):
        await valkey.run(f"redis://:x@127.0.0.1:{port}/0", asyncio.Event(), lambda _: None)
    holder.close()
    await holder.wait_closed()
