"""Text to tokens and back, from a model directory, without torch.

    tokenizer.json                               ids and text (the `tokenizers` library)
    tokenizer_config.json, chat_template.jinja   special tokens and the chat template
    generation_config.json, config.json          the model's end tokens and number of embeddings

Special tokens in text. A raw prompt (`/v1/completions`) is parsed for them, since such prompts are often written
with the model's own markers. In chat, only the template's markers are control tokens (`router.control_tokens`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import jinja2
from tokenizers import Tokenizer as HubTokenizer

from twostroke.cluster.config import FAKE_END_TOKEN, FAKE_VOCAB_SIZE, TemplatesSection
from twostroke.cluster.core.errors import ConfigError, InvalidRequest
from twostroke.engine.vocabulary import byte_vocabulary, read_token_bytes
from twostroke.router.answer_parts import ReasoningParser
from twostroke.router.chat_template import ChatOptions, ChatTemplate, Message
from twostroke.router.control_tokens import ControlTokens
from twostroke.router.request import TextDecoderFactory
from twostroke.router.templates import TemplateStore
from twostroke.router.text import TokenTextDecoderFactory
from twostroke.router.token_ids import decode_one, encode_one
from twostroke.router.tool_calls import ChatStyle

_TAIL_TOKENS = 16
"""Of a prompt, among which the mark that opens reasoning is looked for: it and white space are no more."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatPrompt(NamedTuple):
    tokens: list[int]
    template: str
    """Version of the template files that made it; empty when the configuration names none."""
    style: ChatStyle = ChatStyle()
    """How the model writes tool calls and reasoning."""
    opens_reasoning: bool = False
    """The answer begins within reasoning."""


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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt, with what the model wants around it (usually a begin token) unless that is turned off."""
        ...

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatPrompt:
        """Raises InvalidRequest when the template refuses the messages. May read template files."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids of the vocabulary, control tokens as the markers they are written as."""
        ...

    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells a token; empty for an id without a token."""
        ...

    def spell(self, token: int) -> bytes:
        """The bytes of text that a token stands for; a special token's name; nothing for an id that means nothing."""
        ...

    def text_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to an answer: as `spell`, but nothing for a special token."""
        ...

    @property
    def text_decoders(self) -> TextDecoderFactory: ...


class ByteTokenizer:
    """The shipped fake: a token is a byte, then BEGIN and END. Goes with the fake executor."""

    BEGIN = 256
    END = FAKE_END_TOKEN

    def __init__(self, templates: TemplatesSection | None = None, style: ChatStyle | None = None) -> None:
        """`style` is told of chats without a template file. Raises ConfigError for template files that are wrong."""
        self._templates = TemplateStore(templates or TemplatesSection(), None, {})
        self._style = style or ChatStyle()
        self._token_bytes = byte_vocabulary().token_bytes
        self._factory = TokenTextDecoderFactory(self._token_bytes)

    @property
    def vocab_size(self) -> int:
        return FAKE_VOCAB_SIZE

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return (self.END,)

    @property
    def max_token_bytes(self) -> int:
        return 1

    def spell(self, token: int) -> bytes:
        return {self.BEGIN: b"<begin>", self.END: b"<end>"}.get(token) or self.text_bytes(token)

    def text_bytes(self, token: int) -> bytes:
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    @property
    def text_decoders(self) -> TextDecoderFactory:
        return self._factory

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatPrompt:
        """BEGIN, role, newline, content, END for each message, the tools before them and a message's calls as JSON at
        its end; then BEGIN and the assistant's role. With a template file: the bytes of what that renders.
        """
        options = options or ChatOptions()
        templates = self._templates.current()
        whole = templates.with_system(list(messages))
        if templates.chat is not None:
            text = templates.chat.render(whole, options)
            style = templates.chat.style
            opened = _opens_reasoning(style, text, whole, options)
            return ChatPrompt(list(text.encode()), templates.version, style, opened)
        if tools := options.variables.get("tools"):
            whole = [{"role": "tools", "content": json.dumps(tools)}, *whole]
        tokens: list[int] = []
        for message in whole:
            calls = f"\n{json.dumps(message['tool_calls'])}" if "tool_calls" in message else ""
            tokens += [self.BEGIN, *f"{message['role']}\n{message['content']}{calls}".encode(), self.END]
        if options.continue_final_message:
            tokens.pop()
        elif options.add_generation_prompt:
            tokens += [self.BEGIN, *b"assistant\n"]
        return ChatPrompt(tokens, templates.version, self._style)

    def decode(self, ids: Sequence[int]) -> str:
        """BEGIN and END have no text."""
        return bytes(token for token in ids if token < self.BEGIN).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        if token_id >= self.BEGIN:
            return {self.BEGIN: "<begin>", self.END: "<end>"}.get(token_id, "")
        return chr(token_id) if 0x20 < token_id < 0x7F else f"<0x{token_id:02X}>"


class ModelTokenizer:
    """The tokenizer of a model directory. Raises ConfigError naming the file that is missing or wrong."""

    def __init__(self, directory: Path, templates: TemplatesSection | None = None) -> None:
        source = _read(directory / "tokenizer.json")
        settings = _read_json(directory / "tokenizer_config.json")
        self._tokenizer = HubTokenizer.from_str(source)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        plain, has_normalizer = _without_added_tokens(source)
        self._control = ControlTokens(self._tokenizer, plain)
        special_tokens = _special_tokens(settings)
        own = _chat_template(directory, settings, special_tokens)
        self._templates = TemplateStore(templates or TemplatesSection(), own, special_tokens)
        self._end_token_ids = self._find_ends(directory, special_tokens.get("eos_token", ""))
        self._vocab_size = self._find_vocab_size(directory)
        token_bytes = read_token_bytes(self._tokenizer, source, directory)
        self._token_bytes = token_bytes
        added = self._tokenizer.get_added_tokens_decoder()
        self._names = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
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

    def spell(self, token: int) -> bytes:
        return self._names.get(token) or self.text_bytes(token)

    def text_bytes(self, token: int) -> bytes:
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    @property
    def text_decoders(self) -> TextDecoderFactory:
        return self._factory

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return encode_one(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatPrompt:
        options = options or ChatOptions()
        templates = self._templates.current()
        template = templates.chat
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")

        def render(messages: Sequence[Message], variables: Mapping[str, object]) -> str:
            return template.render(messages, replace(options, variables=variables))

        whole = templates.with_system(list(messages))
        tokens = self._control.encode(whole, options.variables, render)
        opened = _opens_reasoning(template.style, self.decode(tokens[-_TAIL_TOKENS:]), whole, options)
        return ChatPrompt(tokens, templates.version, template.style, opened)

    def decode(self, ids: Sequence[int]) -> str:
        return decode_one(self._tokenizer, ids)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

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


def _opens_reasoning(style: ChatStyle, prompt: str, messages: Sequence[Message], options: ChatOptions) -> bool:
    """The prompt ends with the mark, or within the reasoning of a message that is gone on with."""
    if not style.marks_reasoning:
        return False
    said = str(messages[-1].get("content", "")) if options.continue_final_message else ""
    is_within = said.rfind(ReasoningParser.OPEN) > said.rfind(ReasoningParser.CLOSE)
    return is_within or prompt.rstrip().endswith(ReasoningParser.OPEN)


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
