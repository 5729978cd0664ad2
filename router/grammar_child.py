"""A child process that compiles grammars (`engine.grammar_child`), as the router holds it.

start   returns at once; the process gets ready meanwhile, in a third of a second
ask     a verdict, or it died of the grammar; one at a time
end     kills it, idempotent; whoever starts one ends it
"""

import asyncio
import json
import signal
import sys
from typing import Self

from twostroke.cluster.core.errors import Unavailable
from twostroke.cluster.core.grammar import Grammar
from twostroke.engine.grammar_child import READY, to_line

START_S = 10.0
CLOCK_S = 5.0
"""By the clock, for one grammar; the child's own limit is in CPU time."""
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); \
from twostroke.engine.grammar_child import main; main(float(sys.argv[2]))"


class DiedOfIt(Exception):
    """The child ended over a grammar: by its time limit, its memory limit, or a fault of the library's."""


class GrammarChild:
    """On one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._is_ready = False

    @classmethod
    async def start(cls, limit_s: float) -> Self:
        """`limit_s` of CPU time for each grammar."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _PROGRAM,
            json.dumps(sys.path),
            str(limit_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # A terminal's interrupt is the router's to take.
            start_new_session=True,
        )
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ask(self, grammar: Grammar) -> str:
        """What is wrong with it, empty when nothing is. After any exception the child is of no use, but to be ended.

        Raises DiedOfIt, and Unavailable when that was not the grammar's doing.
        """
        try:
            if not self._is_ready:
                async with asyncio.timeout(START_S):
                    self._is_ready = await self._stdout.readline() == READY
                if not self._is_ready:
                    raise Unavailable("grammars cannot be checked: the process for it does not start")
            async with asyncio.timeout(CLOCK_S):
                line = await self._exchange(to_line(grammar))
                if not line:
                    await self._process.wait()
        except TimeoutError:
            raise Unavailable("grammars cannot be checked: this machine is too busy") from None
        if line:
            return str(json.loads(line))
        if self._process.returncode == -signal.SIGKILL:  # nothing of ours sends it while a grammar is compiled
            raise Unavailable("the process that checks grammars was killed")
        raise DiedOfIt

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._stdin.close()

    async def _exchange(self, line: bytes) -> bytes:
        try:
            self._stdin.write(line)
            await self._stdin.drain()
        except ConnectionError:
            return b""
        return await self._stdout.readline()
