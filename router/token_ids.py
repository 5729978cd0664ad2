"""Calls of the `tokenizers` library that let other threads run meanwhile.

Its calls for one text keep the interpreter's lock to their end, 90 ms for 30,000 tokens, in whatever thread they run,
and no stream goes on. Those for several give it back; without offsets, which nobody needs, they are also quicker.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [list(encoding.ids) for encoding in encodings]


def encode_one(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    return encode_all(tokenizer, [text], add_special_tokens=add_special_tokens)[0]


def decode_one(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """With special tokens."""
    return str(tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0])
