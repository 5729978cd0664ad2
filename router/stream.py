"""What a caller reads of its request: a bounded buffer between the dispatcher and one reader.

The dispatcher puts and never waits; the reader iterates. Deltas of one choice that were not read yet are merged, so
the buffer is bounded by its tokens: `put` reports how many wait, and the dispatcher cuts a reader that is too slow.
A reader that wants the whole answer is woken by every token in vain: `wake_tokens` lets it sleep through some.
Ends: `close` after the last item, or `fail` with the error that iteration raises. A reader that stops early
(closes the iterator, or is cancelled) cancels the request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.router.request import Delta, StreamItem


class BufferedStream:
    """Implements `router.request.RequestStream` for one reader."""

    def __init__(self, on_cancel: Callable[[], object], wake_tokens: int = 0) -> None:
        """The reader is woken when so many tokens wait, and at the end; 0: by each item."""
        self._on_cancel = on_cancel
        self._wake_tokens = wake_tokens
        self._items: deque[StreamItem] = deque()
        self._waiting_tokens = 0
        self._closed = False
        self._error: TwostrokeError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Of the reader, while it waits. An Event would do the same in twice the time, for every token."""

    # ------------------------------------------------------------------------------------ the dispatcher's side

    def put(self, item: StreamItem) -> int:
        """Add an item; answers how many tokens wait to be read."""
        if isinstance(item, Delta):
            self._waiting_tokens += len(item.token_ids)
            last = self._items[-1] if self._items else None
            if isinstance(last, Delta) and last.choice == item.choice:
                self._items.pop()
                item = Delta(
                    item.choice,
                    last.text + item.text,
                    last.token_ids + item.token_ids,
                    last.logprobs + item.logprobs,
                )
        self._items.append(item)
        if self._waiting_tokens >= self._wake_tokens:
            self._wake()
        return self._waiting_tokens

    def close(self) -> None:
        self._closed = True
        self._wake()

    def fail(self, error: TwostrokeError) -> None:
        """What was not read yet is dropped: the error is what the reader needs to know now."""
        self._items.clear()
        self._error = error
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -------------------------------------------------------------------------------------- the reader's side

    async def cancel(self) -> None:
        self._on_cancel()

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    if isinstance(item, Delta):
                        self._waiting_tokens -= len(item.token_ids)
                    yield item
                if self._error is not None:
                    raise self._error
                if self._closed:
                    return
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            if not self._closed:
                self._on_cancel()
