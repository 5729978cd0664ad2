"""Tokens to text, one choice at a time, with one rule for streamed and whole answers.

    token -> its bytes -> UTF-8, holding back an incomplete character -> stop strings, holding back what could
    become one -> certain text

Each token has fixed bytes (`router.tokenizer` makes the table), so text never depends on how tokens are grouped.
Invalid bytes become U+FFFD by Unicode's "maximal subpart" practice, as `tokenizers` does for a whole answer.
The first stop string to be completed wins, and of those completed by the same character the longest; the answer
ends before it. Only text that is a prefix of a stop string at this moment is held back (FIELD-REPORTS E6-E9).
"""

import codecs
from collections.abc import Sequence

from twostroke.router.request import TextStep


class _StopMatcher:
    """Knuth-Morris-Pratt over a stream of characters: constant amortised work each, whatever the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest prefix of the stop string that the text so far ends with."""
        self._fallback = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    def begin(self, text: str) -> None:
        """As `feed` of each character of a text that does not complete the stop string, before any other."""
        longest = min(len(self.stop) - 1, len(text))
        self.matched = next(length for length in range(longest, -1, -1) if text.endswith(self.stop[:length]))

    def feed(self, character: str) -> bool:
        """Take the next character; True when it completes the stop string. Not to be called after that."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.stop[self.matched]
        return self.matched == len(self.stop)


class TokenTextDecoder:
    """Implements `router.request.TextDecoder`. `token_bytes[i]` are the bytes of token i; ids past it have none."""

    def __init__(self, token_bytes: Sequence[bytes], stop: tuple[str, ...]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in stop if text]
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> TextStep:
        """Text that became certain by this token. After `stopped` nothing more comes."""
        if self._stopped:
            return TextStep("", True)
        data = self._token_bytes[token] if token < len(self._token_bytes) else b""
        # Most tokens are whole characters of ASCII.
        text = data.decode("ascii") if data.isascii() and not self._utf8.buffer else self._utf8.decode(data)
        return self._take(text) if self._matchers else TextStep(text, False)

    def skip(self, tokens: Sequence[int]) -> None:
        """As `push` of each, before any other, where none of them completes a stop string; hundreds of times faster."""
        known = self._token_bytes
        text = self._utf8.decode(b"".join([known[token] for token in tokens if token < len(known)]))
        for matcher in self._matchers:
            matcher.begin(text)
        self._held = text[len(text) - max((matcher.matched for matcher in self._matchers), default=0) :]

    def finish(self) -> str:
        """What was held back, with an unfinished character as U+FFFD. Call once, at the answer's end."""
        if self._stopped:
            return ""
        step = self._take(self._utf8.decode(b"", final=True))
        rest = "" if step.stopped else self._held
        self._held = ""
        return step.text + rest

    def _take(self, text: str) -> TextStep:
        if not self._matchers:
            return TextStep(text, False)
        pending = self._held + text
        start = len(self._held)
        for end in range(start + 1, len(pending) + 1):
            completed = [matcher.stop for matcher in self._matchers if matcher.feed(pending[end - 1])]
            if completed:
                self._stopped = True
                self._held = ""
                stop = max(completed, key=len)
                return TextStep(pending[: end - len(stop)], True, stop)
        certain = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[certain:]
        return TextStep(pending[:certain], False)


class TokenTextDecoderFactory:
    """Implements `router.request.TextDecoderFactory` over one table of token bytes."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def __call__(self, stop: tuple[str, ...]) -> TokenTextDecoder:
        return TokenTextDecoder(self._token_bytes, stop)
