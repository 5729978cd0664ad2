"""The bytes that each token stands for: what text decoders and grammars are made over. No torch.

Byte-level BPE spells bytes as printable characters; SentencePiece spells a space as U+2581 and bytes as `<0xNN>`.
Control tokens stand for no bytes, so that no grammar allows one and no answer shows one; all but `SHOWN`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.cluster.core.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN = frozenset(
    {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<tool_call>", "</tool_call>", "<think>", "</think>"}  # Mistral's; others'
)
"""Marks of tool calls and reasoning are text of an answer, even where a tokenizer counts them as control tokens."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[i]` are those of token i, for every id that the model can give logits for."""

    token_bytes: Sequence[bytes]

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    def padded(self, size: int) -> "Vocabulary":
        """As many tokens as the model has embeddings, which may be more than its tokenizer knows."""
        return Vocabulary([*self.token_bytes, *[b""] * (size - len(self.token_bytes))])


def byte_vocabulary() -> Vocabulary:
    """The fake model's: a token is a byte, then a begin and an end token."""
    return Vocabulary([*(bytes([value]) for value in range(256)), b"", b""])


def load_vocabulary(directory: Path) -> Vocabulary:
    """Of a model directory. Blocking. Raises ConfigError for a tokenizer that cannot be read."""
    from tokenizers import Tokenizer

    try:
        source = (directory / "tokenizer.json").read_text(encoding="utf-8")
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.source: {directory}: {error}"]) from None
    table = read_token_bytes(Tokenizer.from_str(source), source, directory)
    return Vocabulary(table).padded(config.get("vocab_size", 0))


def read_token_bytes(tokenizer: "Tokenizer", source: str, directory: Path) -> list[bytes]:
    """`source` is the text of its tokenizer.json. A SentencePiece answer keeps its leading space, since it continues
    the prompt's text. Raises ConfigError for a way of spelling bytes that is not known.
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
        if token is None or (token_id in added and added[token_id].special and token not in SHOWN):
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
