"""Control tokens belong to the template: what a client writes stays text (FIELD-REPORTS E26).

A tokenizer looks for its added tokens ("markers") anywhere in the text it is given, and cannot know who wrote them.
Here each marker inside a client's strings is broken by a guard, a character that occurs nowhere else, before the
template runs; the rendered text is cut at the markers that are left, which are the template's; and the guards are
taken out of the pieces between, which are encoded by a twin of the tokenizer that knows no markers.

    client   hi<|im_end|>          ->  hi<G|im_end|>                  G: the guard
    render   <|im_start|>user\\nhi<G|im_end|><|im_end|>
    cut      [im_start] user\\nhi<|im_end|> [im_end]                  the one in the middle is eight or so text tokens

Also guarded: a text that ends with the beginning of a marker, which the next field's text could complete; and a text
that a normalizer would turn into a marker (full-width characters, letter case). Chats without any of that, nearly
all, are given to the tokenizer whole. Markers that are not flagged special (`<think>`) may stand in assistant
messages, where an earlier answer rightly has them.

What this cannot see: a template that itself builds a marker out of pieces of a client's text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer

from twostroke.cluster.core.records import dataclass
from twostroke.router.chat_template import Message, unused_character
from twostroke.router.token_ids import encode_all, encode_one

_SPACES = " \t\r\n\u2581"


@dataclass(frozen=True, slots=True)
class _Kind:
    """The markers that one sort of text must not bring in."""

    markers: tuple[str, ...]
    """Longest first."""
    beginnings: frozenset[str]
    """Proper prefixes of them."""
    longest: int
    normalized: tuple[str, ...]
    """Those that the tokenizer looks for in normalized text, normalized."""

    def ends_with_a_beginning(self, text: str) -> bool:
        return any(text[-length:] in self.beginnings for length in range(1, min(self.longest, len(text) + 1)))


class ControlTokens:
    """The markers of one tokenizer. Immutable, so any thread may use it."""

    def __init__(self, tokenizer: HubTokenizer, plain: HubTokenizer) -> None:
        """`plain` is the same tokenizer without added tokens."""
        self._tokenizer = tokenizer
        self._plain = plain
        self._normalize: Callable[[str], str] | None = None
        if tokenizer.normalizer is not None:
            self._normalize = tokenizer.normalizer.normalize_str
        added = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.content
        }
        self._ids = {content: token_id for content, (token_id, _) in added.items()}
        # Longest first: of two markers that begin alike the longer is meant. One pass, whatever the prompt.
        self._pattern = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        # Runs of white space are vocabulary that happens to be listed as added tokens (Gemma's), not markers.
        self._any = self._kind(token for _, token in added.values() if token.special or token.content.strip(_SPACES))
        self._special = self._kind(token for _, token in added.values() if token.special)

    def _kind(self, tokens: Iterable[AddedToken]) -> _Kind:
        chosen = sorted(tokens, key=lambda token: len(token.content), reverse=True)
        markers = tuple(token.content for token in chosen)
        normalized: tuple[str, ...] = ()
        if self._normalize is not None:
            normalized = tuple(self._normalize(token.content) for token in chosen if token.normalized)
        beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        return _Kind(markers, beginnings, max(map(len, markers), default=0), normalized)

    def encode(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        render: Callable[[Sequence[Message], Mapping[str, object]], str],
    ) -> list[int]:
        """The ids of a chat. Strings of `messages` (roles aside) and `variables` are the client's.

        Raises InvalidRequest when no character is free for a guard, and what `render` raises.
        """
        if not any(self._is_suspect(text, kind) for text, kind in self._texts(messages, variables)):
            return encode_one(self._tokenizer, render(messages, variables), add_special_tokens=False)
        guard = unused_character(text for text, _ in self._texts(messages, variables))
        guarded = [
            {
                name: value if name == "role" else _map_strings(value, self._guarding(self._kind_of(message), guard))
                for name, value in message.items()
            }
            for message in messages
        ]
        values = {name: _map_strings(value, self._guarding(self._any, guard)) for name, value in variables.items()}
        cut = [(piece.replace(guard, ""), token_id) for piece, token_id in self._cut(render(guarded, values), guard)]
        encoded = encode_all(self._plain, [text for text, _ in cut], add_special_tokens=False)
        tokens: list[int] = []
        for ids, (_, token_id) in zip(encoded, cut, strict=True):
            tokens += ids
            if token_id is not None:
                tokens.append(token_id)
        return tokens

    def _kind_of(self, message: Message) -> _Kind:
        return self._special if message.get("role") == "assistant" else self._any

    def _texts(self, messages: Sequence[Message], variables: Mapping[str, object]) -> Iterator[tuple[str, _Kind]]:
        for message in messages:
            kind = self._kind_of(message)
            for name, value in message.items():
                if name != "role":
                    yield from ((text, kind) for text in _strings(value))
        for value in variables.values():
            yield from ((text, self._any) for text in _strings(value))

    def _is_suspect(self, text: str, kind: _Kind) -> bool:
        if any(marker in text for marker in kind.markers) or kind.ends_with_a_beginning(text):
            return True
        if self._normalize is None or not kind.normalized:
            return False
        normal = self._normalize(text)
        return any(marker in normal for marker in kind.normalized)

    def _guarding(self, kind: _Kind, guard: str) -> Callable[[str], str]:
        def guarded(text: str) -> str:
            for marker in kind.markers:
                if len(marker) == 1:
                    text = text.replace(marker, guard + marker)  # `_cut` knows it
                    continue
                while marker in text:  # again, for markers that overlap themselves
                    text = text.replace(marker, marker[0] + guard + marker[1:])
            return text + guard if kind.ends_with_a_beginning(text) else text

        return guarded

    def _cut(self, text: str, guard: str) -> Iterator[tuple[str, int | None]]:
        """Text split at markers, as (text before, the marker's id); leftmost first, longest of those."""
        start = 0
        for match in self._pattern.finditer(text):
            if len(match.group()) == 1 and text[max(match.start() - 1, 0)] == guard:
                continue
            yield text[start : match.start()], self._ids[match.group()]
            start = match.end()
        yield text[start:], None


def _strings(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    """The same JSON value with every string changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(name)): _map_strings(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value
