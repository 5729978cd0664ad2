"""Where a worker's jobs with a grammar wait until it is compiled, so that the engine never waits for one.

    Submit with a grammar   compiled on a thread, then posted with its constraint; everything else that comes about the
                            job meanwhile waits behind it, so that its messages keep their order
    anything else           posted at once
    a router is gone        what waits for it is dropped

A grammar that does not compile with this model's vocabulary breaks at its first token, which is the client's to know.
The desk itself answers a job that finds `max_waiting` waiting, or whose grammar takes over `timeout_s`: the queue is
full, since routers have tried every grammar (`router.grammar_gate`) and it is those before it that took the time. A job
whose own time is up has expired. Without a vocabulary one is posted as it is, and the scheduler refuses our own fault.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.ids import Incarnation, JobId
from twostroke.cluster.core.messages import Ended, Outcome, RefusalReason, Refused, RouterMessage, Submit
from twostroke.engine.commands import FromRouter, ToRouter
from twostroke.engine.grammar import BrokenState, GrammarCompiler, GrammarError
from twostroke.engine.plan import Constraint

log = structlog.get_logger(__name__)

TIMEOUT_S = 10.0
"""The first grammar of a worker's life also waits for the vocabulary, about a second."""
MAX_WAITING = 1024


class GrammarDesk:
    """On one event loop. `compiler` None: this worker knows no vocabulary and takes no grammar."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        post: Callable[[FromRouter], None],
        tell: Callable[[ToRouter], None],
        *,
        timeout_s: float = TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._compiler = compiler
        self._post = post
        self._tell = tell
        self._lines: dict[tuple[Incarnation, JobId], deque[RouterMessage]] = {}
        self._tasks = TaskOwner("grammars")
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def receive(self, router: Incarnation, message: RouterMessage) -> None:
        line = self._lines.get((router, message.job)) if self._lines else None
        if line is not None:
            line.append(message)
        elif self._compiler is None or not isinstance(message, Submit) or message.sampling.grammar is None:
            self._post(FromRouter(router, message))
        elif len(self._lines) >= self.max_waiting:
            self._refuse(router, message, f"{len(self._lines)} jobs wait here for their grammars")
        else:
            self._lines[router, message.job] = deque([message])
            self._tasks.spawn(self._serve(self._compiler, router, message.job), str(message.job))

    def forget(self, router: Incarnation) -> None:
        """Drop what waits for a router that is gone."""
        for key in [key for key in self._lines if key[0] == router]:
            del self._lines[key]

    async def close(self) -> None:
        self._lines.clear()
        await self._tasks.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, compiler: GrammarCompiler, router: Incarnation, job: JobId) -> None:
        """Post the line of one job, until it is empty or forgotten."""
        line = self._lines[router, job]
        while line:
            message = line[0]
            command: FromRouter | None = FromRouter(router, message)
            if isinstance(message, Submit) and message.sampling.grammar is not None:
                command = await self._compile(compiler, router, message)
            if self._lines.get((router, job)) is not line:
                return
            line.popleft()
            if command is not None:
                self._post(command)
            elif isinstance(message, Submit) and message.time_left_s > self._timeout_s:
                self._refuse(router, message, f"its grammar was not compiled within {self._timeout_s:g} s")
            else:
                late = "its time was up before its grammar was compiled"
                self._tell(ToRouter(router, (Ended(job, Outcome.EXPIRED, message=late),)))
        del self._lines[router, job]

    def _refuse(self, router: Incarnation, submit: Submit, why: str) -> None:
        self._tell(ToRouter(router, (Refused(submit.job, RefusalReason.QUEUE_FULL, why),)))

    async def _compile(self, compiler: GrammarCompiler, router: Incarnation, submit: Submit) -> FromRouter | None:
        """The job as the engine takes it; None when its grammar was not compiled in time."""
        loop = asyncio.get_running_loop()
        assert submit.sampling.grammar is not None
        began_s = loop.time()
        constraint: Constraint | None = None
        try:
            async with asyncio.timeout(min(self._timeout_s, submit.time_left_s)):
                constraint = await loop.run_in_executor(self._threads, compiler.compile, submit.sampling.grammar)
        except TimeoutError:
            log.warning("grammar_late", job=str(submit.job))
            return None
        except GrammarError as error:
            log.warning("grammar_refused", job=str(submit.job))
            constraint = BrokenState(str(error))
        except Exception:  # for example a vocabulary that cannot be read: the job must be answered all the same
            log.exception("grammar_failed", job=str(submit.job))
        left_s = submit.time_left_s - (loop.time() - began_s)
        return FromRouter(router, replace(submit, time_left_s=max(0.001, left_s)), constraint)
