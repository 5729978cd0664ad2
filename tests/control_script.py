"""A small role process for tests of the control plane: ready, then serve until told to leave, or fail.

python control_script.py serve|crash|stubborn PIPE
"""

import asyncio
import os
import sys
from pathlib import Path

from twostroke.cluster.control.child import ChildKeeper, ChildSpec
from twostroke.cluster.control.process import OnReady, run_role
from twostroke.cluster.control.supervisor import MemberState
from twostroke.cluster.core.ids import WorkerId


async def serve(stop: asyncio.Event, on_ready: OnReady) -> None:
    on_ready({"role": "decode", "address": "127.0.0.1:1", "incarnation": "x"})
    await stop.wait()


async def stubborn(stop: asyncio.Event, on_ready: OnReady) -> None:
    on_ready({})
    await asyncio.Event().wait()


async def keep_and_die(directory: Path) -> None:
    keeper = ChildKeeper(
        ChildSpec(
            worker_id=WorkerId("decode-0"),
            role="decode",
            command=(sys.executable, __file__, "serve", "{pipe}"),
            environment=os.environ,
            directory=directory,
            log_path=directory / "child.log",
            drain_s=1.0,
            backoff_s=1.0,
            max_backoff_s=1.0,
        )
    )
    keeper.start()
    while keeper.view().state is not MemberState.READY:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    os.write(1, str(keeper.view().pid).encode())
    os._exit(1)


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "keep-and-die":
        asyncio.run(keep_and_die(Path(sys.argv[2])))
    pipe = int(sys.argv[2])
    if mode == "crash":
        sys.exit("cannot find the weights")
    run_role({"serve": serve, "stubborn": stubborn}[mode], pipe, drain_s=0.2)
