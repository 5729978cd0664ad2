"""A tool call written as JSON, read as it comes. Pure.

    { "name" : "..." , "arguments" : {...} }      either order; other members are passed over

Arguments go out as they are written, from when the name is known. Models also write them as a string that holds JSON,
as null, or not at all where there are none to give: these go out as the object they mean.
"""

import json
from collections.abc import Callable, Collection

_ARGUMENTS = ("arguments", "parameters")
_CLOSERS = {"{": "}", "[": "]"}
_NONE = "{}"


class _Value:
    """Where one JSON value ends. Strict enough to end at a mark that a model sets too early, not to judge JSON."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_text = False
        self._escaped = False

    def feed(self, character: str) -> bool | None:
        """True: the character is the value's last. None: it is not the value's any more."""
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_text = False
                return not self._open
        elif character == '"':
            self._in_text = True
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
        self._step: Callable[[str], bool] = self._in_arguments if name else self._before
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
            at += self._step(text[at])
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
            self._key, self._step = _loaded("".join(self._text)) or "", self._before_colon
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
        self._begin(self._in_arguments if is_arguments and character == "{" else self._in_value)
        return self._step(character)

    def _in_value(self, character: str) -> bool:
        last = self._value.feed(character)
        if last is not None:
            self._text.append(character)
        if last is not False:
            self._step = self._after_value
            self._end_value()
        return last is not None

    def _in_arguments(self, character: str) -> bool:
        last = self._value.feed(character)
        if last is None:
            return self._end()
        self._tell(character)
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
            written = "" if text == "null" else _loaded(text)
            self.over = written is None or not (written or _NONE).startswith("{")
            if not self.over:
                self._tell(written or _NONE)

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


def _loaded(text: str) -> str | None:
    """A JSON string's value; None when it is no string."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
