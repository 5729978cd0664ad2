"""Proof that a prefill worker can ship pages to a decode worker, before any request depends on it.

    attach to both, under an incarnation of our own -> RESERVE -> Leased -> PREFILL with the lease -> HANDED_OVER

The prompt is a page and a token, under a salt of its own, so that no cache stands in for the transfer. HANDED_OVER
means that the decode side has checked count and checksums. Nobody's request is concerned: the dispatcher and its
metrics hear nothing, and closing the links frees whatever is left on the workers.

A broken transfer path is invisible to either worker alone, and to a warm-up that does not ship (FIELD-REPORTS C11).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from twostroke.cluster.core.errors import Overloaded, PeerLost, TransferFailed, TwostrokeError, Unavailable
from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.link import LinkListener, WorkerLink
from twostroke.cluster.core.messages import (
    Ended,
    Leased,
    Outcome,
    RefusalReason,
    Refused,
    Role,
    Stroke,
    Submit,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import SamplingParams

TIMEOUT_S = 20.0
"""Also for the first transfer over torch.distributed, behind what other routers have queued there."""
MAX_TOKENS = 2

ConnectAs = Callable[[WorkerInfo, LinkListener], Awaitable[WorkerLink]]
"""Attach to the worker at `info.address` with this listener, as a router that is nobody else."""


async def ship_once(prefill: WorkerInfo, decode: WorkerInfo, connect: ConnectAs, timeout_s: float = TIMEOUT_S) -> None:
    """Returns when a transfer of the pair was verified. Raises Overloaded when the pair is too busy to tell, else the
    TwostrokeError that says why it cannot.
    """
    courier = _Courier(_submit(prefill, decode))
    links: list[WorkerLink] = []
    try:
        async with asyncio.timeout(timeout_s):
            for info in (prefill, decode):
                link = await connect(info, courier)
                links.append(link)
                if link.info.incarnation != info.incarnation:
                    raise PeerLost(f"another life of {info.worker_id} answers at {info.address}")
            failure = await courier.run(*links)
    except TimeoutError:
        raise TransferFailed(f"no page arrived within {timeout_s:g} s") from None
    finally:
        for link in links:
            link.close("the self-test is over")
    if failure is not None:
        raise failure


def _submit(prefill: WorkerInfo, decode: WorkerInfo) -> Submit:
    room = min(prefill.max_context, decode.max_context) - MAX_TOKENS
    num_tokens = max(1, min(decode.layout.page_size + 1, room))
    name = f"self-test-{secrets.token_hex(8)}"
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return Submit(JobId(RequestId(name), 0, 0), Stroke.RESERVE, (0,) * num_tokens, (), sampling, TIMEOUT_S, salt=name)


class _Courier:
    """The router of one request; implements `core.link.LinkListener`."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._prefill: WorkerLink
        self._done: asyncio.Future[TwostrokeError | None] = asyncio.get_running_loop().create_future()

    async def run(self, prefill: WorkerLink, decode: WorkerLink) -> TwostrokeError | None:
        """Why it failed, or None."""
        self._prefill = prefill
        decode.send([self._submit])
        return await self._done

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            match message:
                case Leased(_, lease):
                    self._prefill.send([replace(self._submit, stroke=Stroke.PREFILL, lease=lease)])
                case Refused(_, RefusalReason.NO_PAGES | RefusalReason.QUEUE_FULL, text):
                    self._end(Overloaded(f"{link.info.worker_id}: {text}"))
                case Refused(_, reason, text):
                    self._end(Unavailable(f"{link.info.worker_id} refuses ({reason.value}): {text}"))
                case Ended(_, Outcome.HANDED_OVER):
                    self._end(None)
                case Ended(_, Outcome.FINISHED) if link.info.role is Role.DECODE:
                    self._end(None)  # the hand-over is told on another link, and may be heard later
                case Ended(_, outcome, _, _, text):
                    self._end(TransferFailed(f"{link.info.worker_id}: {outcome.value}: {text}"))

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self._end(PeerLost(f"{link.info.worker_id}: {reason}"))

    def _end(self, failure: TwostrokeError | None) -> None:
        if not self._done.done():
            self._done.set_result(failure)
