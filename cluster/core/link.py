"""The two ends of an attached stream, as interfaces.

`cluster.attach` implements them over gRPC; `core.link.DirectLink` joins them within a process, for tests and
for a cluster in one process. Calls are made on the event loop's thread and never block; lists keep order.

    router side                                      worker side
    LinkListener  <- on_messages/on_lost -  stream  <- deliver -  Outlet   (given to the app by the server)
    WorkerLink    -  send/close          -> stream  - receive/closed ->    WorkerSession (returned by the app)
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import RouterMessage, WorkerCheck, WorkerInfo, WorkerMessage


class LinkListener(Protocol):
    """The router's side. `on_lost` is called at most once, and nothing after it."""

    def on_messages(self, link: "WorkerLink", messages: Sequence[WorkerMessage]) -> None: ...

    def on_lost(self, link: "WorkerLink", reason: str) -> None: ...


class WorkerLink(Protocol):
    """A live attachment to one incarnation of a worker."""

    @property
    def info(self) -> WorkerInfo: ...

    def send(self, messages: Sequence[RouterMessage]) -> None:
        """Queue for sending, in order. A link that is lost or full drops them; `on_lost` has said or will say so."""
        ...

    def close(self, reason: str) -> None:
        """Idempotent. Everything that the worker held for this router is freed; `on_lost` is not called."""
        ...


class Outlet(Protocol):
    """Where a worker app puts what it has to say to one router."""

    def deliver(self, messages: Sequence[WorkerMessage]) -> None:
        """Queue for sending, in order. Over the stream's bound the stream is closed (the app hears `closed`)."""
        ...


class WorkerSession(Protocol):
    """One router's attachment, as the worker app sees it."""

    def receive(self, messages: Sequence[RouterMessage]) -> None: ...

    def closed(self, reason: str) -> None:
        """The stream broke: free at once everything held for this router. Called exactly once."""
        ...


class WorkerApp(Protocol):
    """A worker as its gRPC face sees it; both roles implement it."""

    @property
    def info(self) -> WorkerInfo: ...

    def attach(self, router: Incarnation, outlet: Outlet) -> WorkerSession: ...

    async def snapshot(self) -> PrefixSnapshot:
        """The engine's true set of named pages, consistent with one event sequence number."""
        ...

    async def check(self) -> WorkerCheck:
        """What is held here now, and whether it adds up. Raises Unavailable when the engine does not answer."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Stop admitting, finish or hand back what is here; True when nothing was left before the timeout."""
        ...


class DirectLink:
    """The shipped fake: a link without a stream. `post` runs a callback later on the caller's loop, in order
    (`loop.call_soon`), so that neither side is ever re-entered.
    """

    def __init__(
        self,
        app: WorkerApp,
        router: Incarnation,
        listener: LinkListener,
        post: Callable[[Callable[[], object]], object],
    ) -> None:
        self._info = app.info
        self._listener = listener
        self._post = post
        self._open = True
        self._session = app.attach(router, self)

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def send(self, messages: Sequence[RouterMessage]) -> None:
        batch = tuple(messages)
        if self._open:
            self._post(lambda: self._session.receive(batch) if self._open else None)

    def deliver(self, messages: Sequence[WorkerMessage]) -> None:
        batch = tuple(messages)
        if self._open:
            self._post(lambda: self._listener.on_messages(self, batch) if self._open else None)

    def close(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._session.closed(reason)

    def cut(self, reason: str) -> None:
        """Break it as a lost peer would: both sides hear of it."""
        if self._open:
            self.close(reason)
            self._listener.on_lost(self, reason)
