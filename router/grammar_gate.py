"""Whether a client's grammar can be compiled and followed, found out before a worker hears of it.

A grammar is a program of the client's: it may be wrong, take for ever, or end the process that compiles it. So the
first to compile it is a child process, which ends itself over a limit of CPU time; what it died of is refused, and
another child is started for the next grammar. Verdicts are kept, since clients repeat their grammars.
"""

import asyncio
from collections import OrderedDict

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import InvalidRequest, Overloaded
from twostroke.cluster.core.grammar import Grammar
from twostroke.router.grammar_child import DiedOfIt, GrammarChild
from twostroke.router.prepare import GenerateParams

log = structlog.get_logger(__name__)

LIMIT_S = 0.25
"""CPU time for one grammar; a usual schema takes 10 ms."""
QUEUE_S = 5.0
KEPT = 1024
MAX_WAITING = 64


async def check_grammar(params: GenerateParams, gate: "GrammarGate | None") -> None:
    """Raises InvalidRequest, Overloaded."""
    if params.grammar is None:
        return
    if gate is None:
        raise InvalidRequest("no grammar is taken here", params.grammar_field)
    await gate.check(params.grammar, params.grammar_field)


class GrammarGate:
    """On one event loop. The first child is started by `open` or the first grammar; the last ends with `close`."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        self._lock = asyncio.Lock()
        """Of the child."""
        self._num_waiting = 0
        self._child: GrammarChild | None = None
        self._tasks = TaskOwner("grammar gate")

    async def open(self) -> None:
        """Start the child, so that the first grammar need not wait for it."""
        async with self._lock:
            await self._ready_child()

    async def check(self, grammar: Grammar, field: str) -> None:
        """Raises InvalidRequest naming `field`, Overloaded while too many grammars wait, Unavailable."""
        fault = self._verdicts.get(grammar)
        if fault is None:
            fault = await self._judge(grammar)
        if fault:
            raise InvalidRequest(f"this grammar cannot be used: {fault}", field)

    async def close(self) -> None:
        """Idempotent."""
        await self._tasks.close()
        async with self._lock:
            await self._end_child()

    async def _judge(self, grammar: Grammar) -> str:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} grammars wait to be compiled")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._lock.acquire()
        except TimeoutError:
            raise Overloaded(f"the grammars before this one took {QUEUE_S:g} s to compile") from None
        finally:
            self._num_waiting -= 1
        try:
            # One that waited behind its like has its verdict now.
            fault = self._verdicts.get(grammar)
            return await self._ask(grammar) if fault is None else fault
        finally:
            self._lock.release()

    async def _ask(self, grammar: Grammar) -> str:
        child = await self._ready_child()
        try:
            fault = await child.ask(grammar)
        except DiedOfIt:
            log.warning("grammar_child_died", characters=len(grammar.text), kind=grammar.kind.value)
            fault = f"it is too complex: more than {self._limit_s:g} s of work, or too much memory"
            await self._end_child()
            # The next one starts while nobody waits for it.
            self._tasks.spawn(self.open(), "grammar child")
        except BaseException:
            # Left in the middle: its answer would be taken for the next one's.
            await self._end_child()
            raise
        self._verdicts[grammar] = fault
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)
        return fault

    async def _ready_child(self) -> GrammarChild:
        if self._child is not None and self._child.has_ended:
            await self._end_child()
        if self._child is None:
            self._child = await GrammarChild.start(self._limit_s)
        return self._child

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()
