"""The blocks that a typed answer is told in: reasoning, text, calls. Pure.

    part of the kind that is open     more of that block
    another kind, or the next call    that block is closed, a new one opened
    no part at all                    one text block, empty, so that every answer says something

However the parts are cut, the blocks are the same: so a whole answer is its stream, put together.
"""

from collections.abc import Sequence
from dataclasses import field
from enum import Enum

from twostroke.cluster.core.records import dataclass
from twostroke.router.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    kind: Kind
    index: int
    """Among the answer's blocks, from 0."""
    number: int
    """Among those of its kind."""
    name: str = ""
    """Of the function that is called."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    """Of text, when they were asked for."""

    @property
    def text(self) -> str:
        """All so far; of a call, its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """What a part does, in this order."""

    closed: Block | None
    opened: Block | None
    block: Block
    text: str
    """Added to `block`."""


class Blocks:
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind is Kind.CALL for block in self.all)

    def take(self, part: Part, logprobs: Sequence[object] = ()) -> Step:
        match part:
            case Content(text):
                step = self._more(Kind.TEXT, text)
            case Reasoning(text):
                step = self._more(Kind.REASONING, text)
            case CallBegin(_, name):
                step = self._next(Kind.CALL, "", name)
            case CallArguments(_, text):
                step = self._more(Kind.CALL, text)
        step.block.logprobs.extend(logprobs)
        return step

    def close(self) -> Block | None:
        """The block that is open, at the answer's end."""
        closed, self._open = self._open, None
        return closed

    def _more(self, kind: Kind, text: str) -> Step:
        block = self._open
        if block is None or block.kind is not kind:
            return self._next(kind, text)
        block.pieces.append(text)
        return Step(None, None, block, text)

    def _next(self, kind: Kind, text: str, name: str = "") -> Step:
        closed = self._open
        number = sum(block.kind is kind for block in self.all)
        block = self._open = Block(kind, len(self.all), number, name, [text] if text else [])
        self.all.append(block)
        return Step(closed, block, block, text)
