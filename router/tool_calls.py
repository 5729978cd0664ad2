"""Tool calls in the forms that models write them. Pure.

    HERMES   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text before them (Hermes, Qwen)
    LLAMA    {"name": ..., "parameters": {...}}; {...}  the whole answer, or it is no call (Llama 3)
    MISTRAL  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name{...}, text before them

A call goes out as it is written: its name when that is whole and its arguments have begun, then the arguments piece by
piece. What turns out to be no call, or to call what was not offered, is text. White space around calls is nobody's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import Enum

from twostroke.cluster.core.records import dataclass
from twostroke.router.answer_parts import (
    CallArguments,
    CallBegin,
    Content,
    Marks,
    MessageParser,
    Part,
    PlainParser,
    ReasoningParser,
    Trimmed,
    joined,
)
from twostroke.router.json_scan import CallScan


class ToolFormat(Enum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a model's answers are written, as far as its chat template tells."""

    tool_format: ToolFormat = ToolFormat.HERMES
    marks_reasoning: bool = False
    shows_tools: bool = True
    """The template tells the model which tools there are."""


def style_of(template: str, *, shows_tools: bool = True) -> ChatStyle:
    """From the source of a chat template."""
    reasoning = ReasoningParser.CLOSE in template
    if MistralParser.OPEN in template:
        return ChatStyle(ToolFormat.MISTRAL, reasoning, shows_tools)
    if HermesParser.OPEN not in template and '"parameters"' in template:
        return ChatStyle(ToolFormat.LLAMA, reasoning, shows_tools)
    return ChatStyle(ToolFormat.HERMES, reasoning, shows_tools)


def make_parser(
    style: ChatStyle,
    names: Collection[str] = (),
    *,
    max_calls: int = 0,
    reasoning: bool = False,
    opened: bool = False,
) -> MessageParser:
    """`names`: of the functions that may be called, of which calls `max_calls` are told (0: all); none: no calls are
    looked for. `reasoning`: that is looked for, and the answer begins within it when the prompt `opened` it.
    """
    inner: MessageParser = PlainParser()
    if names:
        kinds: dict[ToolFormat, Callable[[Collection[str], int], MessageParser]] = {
            ToolFormat.HERMES: HermesParser,
            ToolFormat.LLAMA: LlamaParser,
            ToolFormat.MISTRAL: MistralParser,
        }
        inner = kinds[style.tool_format](names, max_calls)
    return ReasoningParser(inner, opened=opened) if reasoning else inner


class _CallParser(ABC):
    """What the formats have in common.

    outside --a call may begin--> call --over--> after call --> outside
                                   '--it is none: said as text--> outside

    Each state takes text and gives back what it left for the next one.
    """

    def __init__(self, names: Collection[str], max_calls: int) -> None:
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._step: Callable[[str], str] = self._outside
        self._parts: list[Part] = []
        self._num_calls = 0
        self._scan: CallScan | None = None
        self._opening = ""
        """What came before the call under way, and is text if it is none."""
        self._trimmed = Trimmed()
        """White space after text is not told if a call follows."""
        self._said = False
        """There is text since the last call."""

    def push(self, text: str) -> list[Part]:
        while text:
            text = self._step(text)
        return self._take()

    def finish(self) -> list[Part]:
        if self._scan is not None:
            self._end_call()
        else:
            self._say(self._held() + self._opening)
        space = self._trimmed.rest()
        if space and not self._num_calls:
            self._parts.append(Content(space))
        return self._take()

    @abstractmethod
    def _outside(self, text: str) -> str: ...

    @abstractmethod
    def _after_call(self, text: str) -> str: ...

    def _held(self) -> str:
        """Text that may be the beginning of a mark."""
        return ""

    def _say(self, text: str) -> None:
        if self._num_calls and not self._said:
            text = text.lstrip()
        told = self._trimmed.push(text)
        if told:
            self._parts.append(Content(told))
            self._said = True

    def _begin_call(self, opening: str, name: str = "") -> None:
        self._opening, self._scan, self._step = opening, CallScan(self._names, name), self._call

    def _call(self, text: str) -> str:
        scan = self._scan
        assert scan is not None
        was_call = scan.is_call
        arguments, rest = scan.feed(text)
        wanted = not self._max_calls or self._num_calls < self._max_calls
        if scan.is_call and not was_call:
            self._trimmed.rest()
            self._opening = ""
            if wanted:
                self._parts.append(CallBegin(self._num_calls, scan.name))
        if arguments and wanted:
            self._parts.append(CallArguments(self._num_calls, arguments))
        if scan.over:
            self._end_call()
        return rest

    def _end_call(self) -> None:
        """It is over, or the answer ends within it."""
        scan, self._scan = self._scan, None
        assert scan is not None
        if scan.is_call:
            self._num_calls += 1
            self._said = False
            self._step = self._after_call
        else:
            text, self._opening = self._opening + scan.raw, ""
            self._say(text)
            self._step = self._outside

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)


class HermesParser(_CallParser):
    """A closing mark is text where no call is to be closed. Some models write several calls before one."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    _STRAY = " \t\r\n}],"
    """What small models write between a call and what closes it."""

    def __init__(self, names: Collection[str], max_calls: int = 0) -> None:
        super().__init__(names, max_calls)
        self._marks = Marks(self.OPEN, self.CLOSE)
        self._closes = False
        """A closing mark would be a call's."""

    def _outside(self, text: str) -> str:
        said, mark, rest = self._marks.split(text)
        self._say(said)
        if mark == self.OPEN:
            self._begin_call(mark)
        elif mark and not self._closes:
            self._say(mark)
        if mark:
            self._closes = False
        return rest

    def _after_call(self, text: str) -> str:
        self._closes = True
        rest = text.lstrip(self._STRAY)
        if rest.startswith("{"):
            self._begin_call("")
        elif rest:
            self._step = self._outside
        return rest

    def _held(self) -> str:
        held = self._marks.rest()
        return "" if self._closes and not self._said and self.CLOSE.startswith(held) else held


class LlamaParser(_CallParser):
    def __init__(self, names: Collection[str], max_calls: int = 0) -> None:
        super().__init__(names, max_calls)
        self._step = self._after_call

    def _outside(self, text: str) -> str:
        """The answer is text, to its end."""
        self._say(text)
        return ""

    def _after_call(self, text: str) -> str:
        """Or at the beginning."""
        rest = text.lstrip(" \t\r\n;" if self._num_calls else None)
        if not self._num_calls:
            self._say(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._begin_call("")
        elif rest:
            self._step = self._outside
        return rest


class MistralParser(_CallParser):
    OPEN = "[TOOL_CALLS]"
    _MAX_HEAD = 256
    """Characters between the mark and the arguments: white space, a name, and in later models marks of their own."""

    def __init__(self, names: Collection[str], max_calls: int = 0) -> None:
        super().__init__(names, max_calls)
        self._marks = Marks(self.OPEN)
        self._in_list = False

    def _outside(self, text: str) -> str:
        said, mark, rest = self._marks.split(text)
        self._say(said)
        if mark:
            self._opening, self._step = mark, self._head
        return rest

    def _head(self, text: str) -> str:
        """After the mark: a list, or a name."""
        head = self._opening.removeprefix(self.OPEN) + text
        start = head.lstrip()
        size = len(head) - len(start)
        if size > self._MAX_HEAD:
            return self._no_call(self.OPEN, head)
        if start.startswith("["):
            self._opening = self.OPEN + head[: size + 1]
            self._in_list, self._step = True, self._list
            return start[1:]
        before, brace, _ = start.partition("{")
        name, mark, _ = before.partition("[")
        name = name.rstrip()
        fits = name in self._names if brace or mark else self._may_become_name(name)
        if not fits or len(before) > self._MAX_HEAD:
            return self._no_call(self.OPEN, head)
        if not brace:
            self._opening = self.OPEN + head
            return ""
        size += len(before)
        self._in_list = False
        self._begin_call(self.OPEN + head[:size], name)
        return head[size:]

    def _may_become_name(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._names)

    def _list(self, text: str) -> str:
        rest = text.lstrip(" \t\r\n,")
        if self._opening:
            self._opening += text[: len(text) - len(rest)]
        if len(self._opening) > self._MAX_HEAD:
            return self._no_call(self._opening, rest)
        if rest.startswith("{"):
            self._begin_call(self._opening)
        elif rest.startswith("]") and not self._opening:
            self._step = self._outside
            return rest[1:]
        elif rest:
            return self._no_call(self._opening, rest)
        return rest

    def _no_call(self, opening: str, rest: str) -> str:
        self._opening, self._step = "", self._outside
        self._say(opening)
        return rest

    def _after_call(self, text: str) -> str:
        self._step = self._list if self._in_list else self._outside
        return text

    def _held(self) -> str:
        return self._marks.rest()
