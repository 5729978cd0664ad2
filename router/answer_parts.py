"""The parts of a chat answer: text, reasoning, tool calls; and what finds reasoning. Pure.

A parser takes text as it comes and gives parts as soon as they are certain. However the text is cut, the parts of one
kind joined are the same: a parser holds back only what may be the beginning of a mark.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    number: int
    """Of the choice's calls, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, of one call at a time."""

    number: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


class MessageParser(Protocol):
    """Of one choice."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back. Called once, at the answer's end."""
        ...


class PlainParser:
    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Mark:
    """Finds a mark in text that comes in pieces, holding back what may be its beginning."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""

    def split(self, text: str) -> tuple[str, str | None]:
        """(what is before the mark, what comes after it: None while it has not come)."""
        before, found, after = (self._held + text).partition(self._mark)
        if found:
            self._held = ""
            return before, after
        longest = min(len(self._mark) - 1, len(before))
        held = next(size for size in range(longest, -1, -1) if before.endswith(self._mark[:size]))
        self._held = self._mark[:held]
        return before[: len(before) - held], None

    def rest(self) -> str:
        """What is held back, given up."""
        held, self._held = self._held, ""
        return held


class ReasoningParser:
    """Reasoning before everything else, or none. White space around it is nobody's.

    before --<think>--> within --</think>--> after --text--> told: all that comes is the inner parser's
       '--other text---------------------------------------> told
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inner: MessageParser, *, opened: bool = False) -> None:
        """`opened`: the answer begins within reasoning, since the prompt ends with the mark that opens it."""
        self._inner = inner
        self._close = Mark(self.CLOSE)
        self._step: Callable[[str], tuple[list[Part], str]] = self._within if opened else self._before
        self._held = ""
        """Before: all so far. Within: white space that is told if more reasoning follows."""
        self._thought = False

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            told, text = self._step(text)
            parts += told
        return joined(parts)

    def finish(self) -> list[Part]:
        last: list[Part] = []
        if self._step == self._before:
            last = self._inner.push(self._held)
        elif self._step == self._within:
            last = self._reason(self._close.rest())
        return joined([*last, *self._inner.finish()])

    def _before(self, text: str) -> tuple[list[Part], str]:
        self._held += text
        start = self._held.lstrip()
        if start.startswith(self.OPEN):
            self._step, self._held = self._within, ""
            return [], start.removeprefix(self.OPEN)
        if self.OPEN.startswith(start):
            return [], ""
        self._step = self._told
        return [], self._held

    def _within(self, text: str) -> tuple[list[Part], str]:
        thought, after = self._close.split(text)
        parts = self._reason(thought)
        if after is None:
            return parts, ""
        self._step = self._after
        return parts, after

    def _reason(self, text: str) -> list[Part]:
        text = self._held + text
        if not self._thought:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._thought = self._thought or bool(kept)
        return [Reasoning(kept)] if kept else []

    def _after(self, text: str) -> tuple[list[Part], str]:
        rest = text.lstrip()
        if rest:
            self._step = self._told
        return [], rest

    def _told(self, text: str) -> tuple[list[Part], str]:
        return self._inner.push(text), ""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one part."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None), part:
            case Content(one), Content(other):
                found[-1] = Content(one + other)
            case Reasoning(one), Reasoning(other):
                found[-1] = Reasoning(one + other)
            case CallArguments(number, one), CallArguments(_, other):
                found[-1] = CallArguments(number, one + other)
            case _:
                found.append(part)
    return found


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    """Empty for one that began before."""
    arguments: str
    """JSON, as the model wrote it; cut short where the answer was."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer, or what is new of it."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    first: int = 0
    """Number of the first of `calls`; the others follow it."""


def gather(parts: Iterable[Part]) -> Parsed:
    """Parts that follow each other, put together."""
    content, reasoning, first = "", "", 0
    calls: list[Call] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(number, name):
                calls.append(Call(name, ""))
                first = number - len(calls) + 1
            case CallArguments(number, text):
                if not calls:
                    calls, first = [Call("", "")], number
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + text)
    return Parsed(content, reasoning, tuple(calls), first)
