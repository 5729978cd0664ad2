"""Prefix keys: a page's identity is the hash of its tokens chained to its parent's key.

    root  = blake2b-128(b"twostroke/prefix/1" + for each of fingerprint, adapter, salt, page size: u32le length, bytes)
    key_0 = blake2b-128(root  + tokens of page 0 as u32le)
    key_i = blake2b-128(key_{i-1} + tokens of page i as u32le)

Length-prefixed fields keep kinds apart (adapter "x" is not salt "x"); a cryptographic hash over canonical
bytes is the same in every process (FIELD-REPORTS B10, B18, D12). Golden vectors are in the tests.
"""

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from twostroke.cluster.core.ids import PrefixKey

_VERSION = b"twostroke/prefix/1"
KEY_BYTES = 16
_WORD_BYTES = 4


def root_key(fingerprint: str, page_size: int, adapter: str = "", salt: str = "") -> PrefixKey:
    """The parent of every first page under one model, adapter, salt and page size."""
    digest = blake2b(_VERSION, digest_size=KEY_BYTES)
    for field in (fingerprint.encode(), adapter.encode(), salt.encode(), str(page_size).encode()):
        digest.update(struct.pack("<I", len(field)))
        digest.update(field)
    return PrefixKey(digest.digest())


def child_key(parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """The key of the page that holds exactly `tokens` and follows `parent`.

    Raises OverflowError when a token id is negative or does not fit 32 bits.
    """
    return _child(parent, _words(tokens))


def page_keys(root: PrefixKey, tokens: Sequence[int], page_size: int) -> list[PrefixKey]:
    """Keys of all full pages of `tokens`, first page first."""
    keys: list[PrefixKey] = []
    parent, words = root, _words(tokens)
    step = page_size * _WORD_BYTES
    for start in range(0, len(words) - step + 1, step):
        parent = _child(parent, words[start : start + step])
        keys.append(parent)
    return keys


def _words(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if words.itemsize != _WORD_BYTES:  # pragma: no cover - no supported platform
        raise OverflowError("array('I') is not 32 bits wide here")
    return words.tobytes()


def _child(parent: PrefixKey, words: bytes) -> PrefixKey:
    return PrefixKey(blake2b(parent + words, digest_size=KEY_BYTES).digest())


def max_hit_pages(num_tokens: int, page_size: int) -> int:
    """How many leading pages a hit may cover: never the last token, whose logits must be computed."""
    return max(0, (num_tokens - 1) // page_size)
