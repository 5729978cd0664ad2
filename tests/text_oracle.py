"""What text may be told of tokens, worked out from their bytes in the plainest way: the judge of `router.text`."""

import codecs
from collections.abc import Sequence


def text_of(pieces: Sequence[bytes], *, final: bool) -> str:
    """Of tokens that stand for these bytes; an unfinished character at the end is U+FFFD when nothing follows."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces), final)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that ends first; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


def certain(text: str, stops: Sequence[str]) -> str:
    """Without a stop string in it: all but what could still become one."""
    lengths = range(max(map(len, stops), default=1) - 1, 0, -1)
    held = next((n for n in lengths if any(len(stop) > n and text[-n:] == stop[:n] for stop in stops)), 0)
    return text[: len(text) - held]
