"""The parts of a chat answer: text, reasoning, tool calls; and what finds reasoning. Pure.

A parser takes text as it comes and gives parts as soon as they are certain. However the text is cut, the parts of one
kind joined are the same: a parser holds back only what may be the beginning of a mark.
"""

import re
from collections.abc import Callable, Iterable
from typing import Protocol

from twostroke.cluster.core.records import dataclass


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


class Marks:
    """Finds the first of some marks in text that comes in pieces, holding back what may be its beginning."""

    def __init__(self, *marks: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))
        self._held = ""

    def split(self, text: str) -> tuple[str, str, str]:
        """(what is before a mark, the mark: empty while none has come, what comes after it)."""
        text = self._held + text
        found = self._pattern.search(text)
        if found is not None:
            self._held = ""
            return text[: found.start()], found.group(), text[found.end() :]
        self._held = next(filter(text.endswith, self._beginnings), "")
        return text[: len(text) - len(self._held)], "", ""

    def rest(self) -> str:
        """What is held back, given up."""
        held, self._held = self._held, ""
        return held


class Trimmed:
    """Text that comes in pieces, without the white space at its end: that is held back until more text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """What is certain: it ends with no white space."""
        kept = text.rstrip()
        told = "".join([*self._held, kept]) if kept else ""
        if kept:
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
        return told

    def rest(self) -> str:
        """What is held back, given up."""
        held = "".join(self._held)
        self._held.clear()
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
        self._close = Marks(self.CLOSE)
        self._step: Callable[[str], tuple[list[Part], str]] = self._within if opened else self._before
        self._space: list[str] = []
        self._start = ""
        """Before: what came, first white space."""
        self._trimmed = Trimmed()
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
            last = self._inner.push("".join(self._space) + self._start)
        elif self._step == self._within:
            last = self._reason(self._close.rest())
        return joined([*last, *self._inner.finish()])

    def _before(self, text: str) -> tuple[list[Part], str]:
        start = self._start + text
        self._start = start if self._start else start.lstrip()
        self._space.append(start[: len(start) - len(self._start)])
        if self._start.startswith(self.OPEN):
            self._step = self._within
            return [], self._start.removeprefix(self.OPEN)
        if self.OPEN.startswith(self._start):
            return [], ""
        self._step = self._told
        return [], "".join(self._space) + self._start

    def _within(self, text: str) -> tuple[list[Part], str]:
        thought, closed, after = self._close.split(text)
        if closed:
            self._step = self._after
        return self._reason(thought), after

    def _reason(self, text: str) -> list[Part]:
        told = self._trimmed.push(text if self._thought else text.lstrip())
        self._thought = self._thought or bool(told)
        return [Reasoning(told)] if told else []

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
