"""What workers hold right now, for `status`: attach as one more router, take the first load report, leave.

A worker sends its load at least every 500 ms on each attached stream, so this needs no call of its own; an
attachment that submits nothing leaves nothing behind.
"""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from twostroke.cluster.attach import connect
from twostroke.cluster.control.child import ChildView
from twostroke.cluster.control.supervisor import MemberRole, MemberState
from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.core.ids import WorkerId, new_incarnation
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import LoadReport, WorkerMessage

log = structlog.get_logger(__name__)

LOAD_TIMEOUT_S = 2.0
WORKERS = (MemberRole.PREFILL.value, MemberRole.DECODE.value)


class _FirstLoad:
    """A `LinkListener` that waits for one load report."""

    def __init__(self) -> None:
        self.load: asyncio.Future[LoadReport | None] = asyncio.get_running_loop().create_future()

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            if isinstance(message, LoadReport) and not self.load.done():
                self.load.set_result(message)

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        if not self.load.done():
            self.load.set_result(None)


async def read_loads(views: Iterable[ChildView]) -> dict[WorkerId, LoadReport]:
    """Load of each ready worker that answers within LOAD_TIMEOUT_S; the others are left out."""
    asked = [view for view in views if view.role in WORKERS and view.state is MemberState.READY]
    loads = await asyncio.gather(*(_read_load(view) for view in asked))
    return {view.worker_id: load for view, load in zip(asked, loads, strict=True) if load is not None}


async def _read_load(view: ChildView) -> LoadReport | None:
    listener = _FirstLoad()
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            link = await connect(view.ready["address"], new_incarnation(), listener)
            try:
                return await listener.load
            finally:
                link.close("status was read")
    except (TwostrokeError, TimeoutError) as error:
        log.debug("load_unknown", worker_id=view.worker_id, reason=repr(error))
        return None
