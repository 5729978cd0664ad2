"""One request over any wire: attempts, their deadline, and the stream that the caller reads.

    attempt -> Started -> pieces -> Ended          the answer
       |          |
       '----------'-- an error before the first piece: wait as the policy says, next attempt
                                    an error after it: raised; a piece that was given cannot be taken back

The deadline covers all attempts and waits together. Leaving the stream early closes the attempt, which cancels the
request on the server.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import TracebackType
from typing import TypeVar

from twostroke.client.retry import RetryPolicy
from twostroke.client.types import Answer, CallPiece, Piece, ToolCall, Usage
from twostroke.cluster.core.errors import DeadlineExceeded, InvalidRequest, PeerLost, TwostrokeError

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Last of a complete answer."""

    finish_reason: str
    usage: Usage
    continuation: str


Item = Started | Piece | Ended
Attempt = Callable[[float], AsyncGenerator[Item, None]]
"""Begins one attempt, with the seconds that are left. Its iteration raises TwostrokeErrors only."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """How a client calls. `sleep` and `random` are replaced in tests."""

    policy: RetryPolicy = RetryPolicy()
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Random = field(default_factory=Random)

    async def call(self, once: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
        """The result of `once(seconds left)`, tried again as the policy allows. Raises TwostrokeError."""
        deadline = Deadline(timeout_s)
        attempt = 1
        while True:
            try:
                return await deadline.bound(once(deadline.left_s()))
            except TwostrokeError as error:
                await self.wait(attempt, error, deadline)
            attempt += 1

    async def wait(self, attempt: int, error: TwostrokeError, deadline: "Deadline") -> None:
        """Wait before the next attempt, or raise `error` when there is none."""
        delay = self.policy.delay_s(attempt, error, deadline.left_s(), self.random)
        if delay is None:
            raise error
        await self.sleep(delay)


@contextmanager
def encoding() -> Iterator[None]:
    """Raises InvalidRequest for what the wire cannot carry: a negative id, a lone surrogate, a list of two kinds."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at = asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float:
        """Never negative."""
        return max(0.0, self._at - asyncio.get_running_loop().time())

    async def bound(self, work: Awaitable[T]) -> T:
        """Raises DeadlineExceeded when the time is up before `work` is done."""
        try:
            async with asyncio.timeout(self.left_s()):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within {self._timeout_s:g} s") from None


class AnswerStream:
    """An answer as it is made: `async with client.stream(...) as stream`, then `async for piece in stream`, once.

    Iteration raises the TwostrokeError that the request failed with. `answer` is there after the last piece.
    """

    def __init__(self, attempt: Attempt, caller: Caller, timeout_s: float) -> None:
        self._attempt = attempt
        self._caller = caller
        self._timeout_s = timeout_s
        self._pieces: AsyncGenerator[Piece, None] | None = None
        self._request_id = ""
        self._taken: list[Piece] = []
        self._ended: Ended | None = None

    async def __aenter__(self) -> "AnswerStream":
        self._pieces = self._run(Deadline(self._timeout_s))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pieces is not None:
            await self._pieces.aclose()

    def __aiter__(self) -> AsyncIterator[Piece]:
        if self._pieces is None:
            raise RuntimeError("enter the stream with `async with` first")
        return self._pieces

    @property
    def answer(self) -> Answer:
        """Raises RuntimeError before the last piece."""
        if self._ended is None:
            raise RuntimeError("the answer has not ended")
        return Answer(
            request_id=self._request_id,
            text="".join(piece.text for piece in self._taken),
            token_ids=tuple(token for piece in self._taken for token in piece.token_ids),
            finish_reason=self._ended.finish_reason,
            usage=self._ended.usage,
            logprobs=tuple(entry for piece in self._taken for entry in piece.logprobs),
            continuation=self._ended.continuation,
            reasoning="".join(piece.reasoning for piece in self._taken),
            tool_calls=_joined(part for piece in self._taken for part in piece.calls),
        )

    async def _run(self, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        attempt = 1
        while True:
            try:
                async with aclosing(self._attempt(deadline.left_s())) as items:
                    async with aclosing(self._read(items, deadline)) as pieces:
                        async for piece in pieces:
                            yield piece
                    return
            except TwostrokeError as error:
                if self._taken:
                    raise
                await self._caller.wait(attempt, error, deadline)
            attempt += 1

    async def _read(self, items: AsyncGenerator[Item, None], deadline: Deadline) -> AsyncGenerator[Piece, None]:
        while self._ended is None:
            try:
                item = await deadline.bound(anext(items))
            except StopAsyncIteration:
                raise PeerLost("the answer stopped before its end") from None
            match item:
                case Started(request_id):
                    self._request_id = request_id
                case Ended():
                    self._ended = item
                case Piece():
                    self._taken.append(item)
                    yield item


def _joined(parts: Iterable[CallPiece]) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for part in parts:
        if part.id or not calls:
            calls.append(ToolCall(part.id, part.name, part.arguments))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    return tuple(calls)
