"""Text to tokens and back, from a model directory, without torch.

    tokenizer.json                               ids and text (the `tokenizers` library)
    tokenizer_config.json, chat_template.jinja   special tokens and the chat template
    generation_config.json, config.json          the model's end tokens and number of embeddings

Special tokens in text. A raw prompt (`/v1/completions`) is parsed for them, since such prompts are often written
with the model's own markers. In chat, only the template's markers are control tokens: a marker that a message
contains is encoded as the text it is (FIELD-REPORTS E26), except markers that are not flagged special inside
assistant messages, which an earlier answer may rightly hold.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jinja2
from tokenizers import Tokenizer as HubTokenizer

from twostroke.cluster.config import FAKE_END_TOKEN, FAKE_VOCAB_SIZE
from twostroke.cluster.core.errors import ConfigError, InvalidRequest
from twostroke.router.chat_template import ChatTemplate, Message
from twostroke.router.request import TextDecoderFactory
from twostroke.router.text import TokenTextDecoderFactory

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Protocol):
    """What the router needs of a tokenizer. Methods are synchronous, thread-safe and do not touch the network."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 <= id < vocab_size."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The model's own ends, which `ignore_eos` turns off."""
        ...

    @property
    def max_token_bytes(self) -> int:
        """No token stands for more bytes of text; 0 when that is not known."""
        ...

    def encode(self, text: str) -> list[int]:
        """A raw prompt, with what the model wants around it (usually a begin token)."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Raises InvalidRequest when the template refuses the messages."""
        ...

    @property
    def text_decoders(self) -> TextDecoderFactory: ...


class ByteTokenizer:
    """The shipped fake: a token is a byte, then BEGIN and END. Goes with the fake executor."""

    BEGIN = 256
    END = FAKE_END_TOKEN

    def __init__(self) -> None:
        self._factory = TokenTextDecoderFactory([bytes([value]) for value in range(256)] + [b"", b""])

    @property
    def vocab_size(self) -> int:
        return FAKE_VOCAB_SIZE

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (self.END,)

    @property
    def max_token_bytes(self) -> int:
        return 1

    @property
    def text_decoders(self) -> TextDecoderFactory:
        return self._factory

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """BEGIN, role, newline, content, END for each message; then BEGIN and the assistant's role."""
        tokens: list[int] = []
        for message in messages:
            tokens += [self.BEGIN, *f"{message['role']}\n{message['content']}".encode(), self.END]
        return [*tokens, self.BEGIN, *b"assistant\n"]


class ModelTokenizer:
    """The tokenizer of a model directory. Raises ConfigError naming the file that is missing or wrong."""

    def __init__(self, directory: Path) -> None:
        source = _read(directory / "tokenizer.json")
        settings = _read_json(directory / "tokenizer_config.json")
        self._tokenizer = HubTokenizer.from_str(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain, has_normalizer = _without_added_tokens(source)
        self._added = {
            token.content: (token_id, token.special)
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content
        }
        # Longest first: of two markers that begin alike the longer is meant. One pass, whatever the prompt.
        self._markers = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))))
        special_tokens = _special_tokens(settings)
        self._template = _chat_template(directory, settings, special_tokens)
        self._end_token_ids = self._find_ends(directory, special_tokens.get("eos_token", ""))
        self._vocab_size = self._find_vocab_size(directory)
        token_bytes = _token_bytes(self._tokenizer, source, directory)
        # A normalizer may shorten text (NFC by three at most), so its bound is looser.
        self._max_token_bytes = max(map(len, token_bytes)) * (4 if has_normalizer else 1)
        self._factory = TokenTextDecoderFactory(token_bytes)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_token_ids

    @property
    def max_token_bytes(self) -> int:
        return self._max_token_bytes

    @property
    def text_decoders(self) -> TextDecoderFactory:
        return self._factory

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        if not any(marker in text for message in messages for text, marker in self._suspects(message)):
            return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids)
        return self._encode_guarded(messages)

    def _suspects(self, message: Message) -> Iterable[tuple[str, str]]:
        """(text of the message, marker that would be taken for a control token in it)."""
        assistant = message.get("role") == "assistant"
        for text in message.values():
            if isinstance(text, str):
                for marker, (_, special) in self._added.items():
                    if special or not assistant:
                        yield text, marker

    def _encode_guarded(self, messages: Sequence[Message]) -> list[int]:
        """Encode so that markers within messages stay text.

        A guard character that occurs nowhere goes into each such marker before rendering; the rendered text is
        then cut at the markers that remain, which are the template's, and the guards are removed from the rest.
        """
        assert self._template is not None
        texts = [text for message in messages for text in message.values() if isinstance(text, str)]
        guard = next((c for c in map(chr, range(0xFDD0, 0xFDF0)) if not any(c in text for text in texts)), None)
        if guard is None:
            raise InvalidRequest("messages hold every Unicode noncharacter together with a control token", "messages")
        guarded: list[Message] = []
        for message in messages:
            markers = sorted({marker for text, marker in self._suspects(message) if marker in text}, key=len)
            fields = dict(message)
            for name, text in fields.items():
                if isinstance(text, str):
                    for marker in reversed(markers):
                        text = text.replace(marker, marker[0] + guard + marker[1:])
                    fields[name] = text
            guarded.append(fields)
        tokens: list[int] = []
        for piece, token_id in self._cut(self._template.render(guarded)):
            text = piece.replace(guard, "")
            tokens += self._plain.encode(text, add_special_tokens=False).ids if text else ()
            if token_id is not None:
                tokens.append(token_id)
        return tokens

    def _cut(self, text: str) -> Iterable[tuple[str, int | None]]:
        """Text split at markers, as (text before, the marker's id); leftmost first, longest of those."""
        start = 0
        for match in self._markers.finditer(text):
            yield text[start : match.start()], self._added[match.group()][0]
            start = match.end()
        yield text[start:], None

    def _find_ends(self, directory: Path, eos_token: str) -> tuple[int, ...]:
        ends: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name).get("eos_token_id")
            ends.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
        eos = self._tokenizer.token_to_id(eos_token) if eos_token else None
        return tuple(sorted(ends | ({eos} if eos is not None else set())))

    def _find_vocab_size(self, directory: Path) -> int:
        """The model's number of embeddings, which may differ from the tokenizer's number of tokens."""
        value = _read_json(directory / "config.json").get("vocab_size")
        return value if isinstance(value, int) else self._tokenizer.get_vocab_size(with_added_tokens=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"model.source: {path}: {error}"]) from None


def _read_json(path: Path) -> dict[str, object]:
    """The object in a file; empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError([f"model.source: {path}: {error}"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"model.source: {path}: not a JSON object"])
    return value


def _without_added_tokens(source: str) -> tuple[HubTokenizer, bool]:
    """The same tokenizer taking all markers for text; and whether it normalizes text."""
    parsed = json.loads(source)
    plain = HubTokenizer.from_str(
        json.dumps({**parsed, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None})
    )
    return plain, parsed.get("normalizer") is not None


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by the names that templates use; a token is a string or an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_template(
    directory: Path, settings: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a file of its own, else of the settings (of several, the one named `default`)."""
    path = directory / "chat_template.jinja"
    source: object = _read(path) if path.exists() else settings.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"model.source: {directory}: chat template: {error}"]) from None


def _token_bytes(tokenizer: HubTokenizer, source: str, directory: Path) -> list[bytes]:
    """The bytes that each token stands for; none for special tokens.

    Byte-level BPE spells bytes as printable characters; SentencePiece spells a space as U+2581 and bytes as
    `<0xNN>`. A SentencePiece answer keeps its leading space, since it continues the prompt's text.
    """
    kinds = set(_decoder_kinds(json.loads(source).get("decoder")))
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"ByteFallback", "Metaspace"}:
        raise ConfigError([f"model.source: {directory}: tokenizer decoder {sorted(kinds)} is not supported"])
    added = tokenizer.get_added_tokens_decoder()
    spelling = _byte_level_spelling()
    table: list[bytes] = []
    for token_id in range(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1):
        token = tokenizer.id_to_token(token_id)
        if token is None or (token_id in added and added[token_id].special):
            table.append(b"")
        elif byte_level:
            known = all(character in spelling for character in token)
            table.append(bytes(spelling[character] for character in token) if known else token.encode())
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table.append(bytes.fromhex(token[3:5]))
        else:
            table.append(token.replace("\u2581", " ").encode())
    return table


def _decoder_kinds(decoder: object) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)


def _byte_level_spelling() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100, U+0101, ... in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}
