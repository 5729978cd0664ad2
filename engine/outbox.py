"""What a scheduler has to say, in the order in which others must hear it. Pure.

Per router one `ToRouter` a flush: leases, refusals, starts and what is told of prompts first, then all tokens in
one message, then ends, so a job's Started comes before its tokens and its Ended after them. Events for the worker
itself come before every `ToRouter`: a lease is in the lease book before a router, hence a writer, can know of it.
"""

from collections import defaultdict

from twostroke.cluster.core.events import PrefixBatch, PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import (
    Ended,
    Leased,
    PromptLogprobs,
    Refused,
    Started,
    TokenRun,
    Tokens,
    WorkerMessage,
)
from twostroke.engine.commands import Event, Published, ToRouter
from twostroke.engine.page_allocator import PageAllocator


class Outbox:
    """Also numbers this incarnation's prefix batches, because a batch is cut where a flush is."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._events: list[Event] = []
        self._heads: defaultdict[Incarnation, list[WorkerMessage]] = defaultdict(list)
        self._tokens: defaultdict[Incarnation, list[TokenRun]] = defaultdict(list)
        self._ends: defaultdict[Incarnation, list[Ended]] = defaultdict(list)
        self.event_sequence = 0

    def event(self, event: Event) -> None:
        self._events.append(event)

    def tell(self, router: Incarnation, message: Leased | Refused | Started | PromptLogprobs) -> None:
        self._heads[router].append(message)

    def tokens(self, router: Incarnation, run: TokenRun) -> None:
        self._tokens[router].append(run)

    def ended(self, router: Incarnation, message: Ended) -> None:
        self._ends[router].append(message)

    def forget(self, router: Incarnation) -> None:
        """The router is gone: what was to be told it is dropped."""
        for queue in (self._heads, self._tokens, self._ends):
            queue.pop(router, None)

    def take(self, allocator: PageAllocator) -> list[Event]:
        """Everything since the last call."""
        self._publish(allocator)
        events, self._events = self._events, []
        for router in dict.fromkeys([*self._heads, *self._tokens, *self._ends]):
            messages: list[WorkerMessage] = list(self._heads.get(router, ()))
            if router in self._tokens:
                messages.append(Tokens(tuple(self._tokens[router])))
            messages += self._ends.get(router, ())
            events.append(ToRouter(router, tuple(messages)))
        self._heads.clear()
        self._tokens.clear()
        self._ends.clear()
        return events

    def snapshot(self, allocator: PageAllocator) -> PrefixSnapshot:
        """All names as of the batch that holds every change made so far, which is published first."""
        self._publish(allocator)
        return PrefixSnapshot(self._incarnation, self.event_sequence, allocator.named_keys())

    def _publish(self, allocator: PageAllocator) -> None:
        changes = allocator.take_changes()
        if changes.stored or changes.removed:
            self.event_sequence += 1
            batch = PrefixBatch(self._incarnation, self.event_sequence, changes.stored, changes.removed)
            self._events.append(Published(batch))
