"""A tool call written as JSON, read as it comes. Pure.

    { "name" : "..." , "arguments" : {...} }      either order; other members are passed over

The first is one that calls begin with: else it is other JSON, which need not wait for its end to be told.

Arguments go out as they are written, from when the name is known; but what may not stand in a JSON string, line breaks
and backslashes that escape nothing, goes out escaped. Models also write them as a string that holds JSON, as null, or
not at all where there are none to give: these go out as the object they mean.
"""

import json
import re
from collections.abc import Callable, Collection

_ARGUMENTS = ("arguments", "parameters")
_FIRST = ("name", *_ARGUMENTS, "type", "id")
_CLOSERS = {"{": "}", "[": "]"}
_NONE = "{}"
_SPACE = " \t\r\n"
_ESCAPABLE = frozenset('"\\/bfnrtu')
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Of a string: what stands for itself."""


class _Value:
    """Where one JSON value ends. Strict enough to end at a mark that a model sets too early, not to judge JSON."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self.in_text = False
        self.escapes = False
        """The character before was a backslash that escapes the next."""

    def feed(self, character: str) -> bool | None:
        """True: the character is the value's last. None: it is not the value's any more."""
        if self.in_text:
            if self.escapes:
                self.escapes = False
            elif character == "\\":
                self.escapes = True
            elif character == '"':
                self.in_text = False
                return not self._open
        elif character == '"':
            self.in_text = True
        elif character in _CLOSERS:
            self._open.append(character)
        elif self._open and character == _CLOSERS[self._open[-1]]:
            self._open.pop()
            return not self._open
        elif character in ",:" or character.isspace():
            return False if self._open else None
        elif not (character.isalnum() or character in "+-._"):
            return None
        return False


class CallScan:
    """`feed` until `over`. Before `is_call` what it has read may yet turn out to be text."""

    def __init__(self, names: Collection[str], name: str = "") -> None:
        """`names` are those that may be called; another is no call. With `name`, only the arguments are to be read."""
        self._names = names
        self.name = name
        self.is_call = False
        """A call, whatever comes: the name is known, and its arguments have begun or are none."""
        self.over = False
        self._only_arguments = bool(name)
        self._step: Callable[[str], bool] = self._open_arguments if name else self._before
        self._key = ""
        self._value = _Value()
        self._text: list[str] = []
        """Of the key or value under way."""
        self._raw: list[str] = []
        self._told: list[str] = []
        """Arguments that are not given out yet."""
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All that was read, for when it is no call."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[str, str]:
        """(arguments that are certain now, what comes after the call: empty unless it is over)."""
        at = 0
        while at < len(text) and not self.over:
            at += self._plain(text, at) or self._step(text[at])
        if not self.is_call:
            self._raw.append(text[:at])
            return "", text[at:]
        told, self._told = "".join(self._told), []
        return told, text[at:]

    # Each step takes one character and says whether it was the call's.

    def _before(self, character: str) -> bool:
        if character == "{":
            self._step = self._before_key
            return True
        return self._space_or_end(character)

    def _before_key(self, character: str) -> bool:
        if character == '"':
            self._begin(self._in_key)
            return self._step(character)
        if character == "}":
            return self._close()
        return self._space_or_end(character)

    def _in_key(self, character: str) -> bool:
        self._text.append(character)
        if self._value.feed(character):
            is_first = not self._key
            self._key, self._step = _loaded("".join(self._text)) or "", self._before_colon
            self.over = is_first and self._key not in _FIRST
        return True

    def _before_colon(self, character: str) -> bool:
        if character == ":":
            self._step = self._before_value
            return True
        return self._space_or_end(character)

    def _before_value(self, character: str) -> bool:
        if character.isspace():
            return True
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        self._begin(self._open_arguments if is_arguments and character == "{" else self._in_value)
        return self._step(character)

    def _in_value(self, character: str) -> bool:
        last = self._value.feed(character)
        if last is not None:
            self._text.append(character)
        if last is not False:
            self._step = self._after_value
            self._end_value()
        return last is not None

    def _open_arguments(self, character: str) -> bool:
        self._value.feed(character)
        self._told, self._step = [character], self._begin_arguments
        return True

    def _begin_arguments(self, character: str) -> bool:
        """No call, if the brace before opened something else than JSON."""
        if character in _SPACE:
            self._told.append(character)
            return True
        if character not in '"}':
            return self._end()
        self._step = self._in_arguments
        return self._step(character)

    def _plain(self, text: str, at: int) -> int:
        """How many of the next characters are arguments' as they are: told at once."""
        if not self._value.in_text or self._value.escapes or self._step != self._in_arguments:
            return 0
        found = _PLAIN.match(text, at)
        assert found is not None
        if found.group():
            self._tell(found.group())
        return len(found.group())

    def _in_arguments(self, character: str) -> bool:
        in_text, escaped = self._value.in_text, self._value.escapes
        last = self._value.feed(character)
        if last is None:
            return self._end()
        if not self._value.escapes:
            self._tell(_in_json(character, escaped=escaped) if in_text else character)
        if last:
            self._step = self._after_value
            self.over = self._only_arguments
        return True

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._step = self._before_key
            return True
        if character == "}":
            return self._close()
        return self._space_or_end(character)

    def _begin(self, step: Callable[[str], bool]) -> None:
        self._step, self._value, self._text = step, _Value(), []

    def _end_value(self) -> None:
        text = "".join(self._text)
        if self._key == "name" and not self.name:
            self.name = _loaded(text) or ""
            self.over = self.name not in self._names
            self.is_call = self._has_arguments and not self.over
        elif self._key in _ARGUMENTS and not self._has_arguments:
            arguments = _NONE if text in ("null", '""') else _object_in(_loaded(text))
            self.over = arguments is None
            if arguments is not None:
                self._tell(arguments)

    def _tell(self, arguments: str) -> None:
        self._told.append(arguments)
        self._has_arguments = True
        self.is_call = bool(self.name)

    def _close(self) -> bool:
        if self.name and not self._has_arguments:
            self._tell(_NONE)
        self.over = True
        return True

    def _space_or_end(self, character: str) -> bool:
        return character.isspace() or self._end()

    def _end(self) -> bool:
        """What comes is no call's: over, as far as it got."""
        self.over = True
        return False


def _in_json(character: str, *, escaped: bool) -> str:
    """Of a string, with the backslash before it."""
    if escaped:
        return "\\" + character if character in _ESCAPABLE else "\\\\" + _in_json(character, escaped=False)
    return json.dumps(character)[1:-1] if character < " " else character


def _loaded(text: str) -> str | None:
    """A JSON string's value; None when it is no string."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    # Half a character, which escapes can write, has no place in an answer.
    return str(value).encode(errors="replace").decode()


def _object_in(text: str | None) -> str | None:
    """The JSON object that is written in a text, as it goes out; None when there is none."""
    if text is None or not text.lstrip().startswith("{"):
        return None
    scan = CallScan((), "it")
    arguments, rest = scan.feed(text.strip())
    return arguments if scan.is_call and scan.over and not rest else None
