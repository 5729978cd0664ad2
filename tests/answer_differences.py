"""Where two answers differ, in words: `choices[1].text: 'ab' and 'ac'`."""

from collections.abc import Iterator, Mapping
from typing import Any

NEAR = 1e-4
"""Log-probabilities may differ by this."""


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Nothing when the two JSON-like values are the same, numbers with a fraction within `NEAR`."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in [*left, *(name for name in right if name not in left)]:
            if name in left and name in right:
                yield from differences(left[name], right[name], f"{path}.{name}".removeprefix("."))
            else:
                yield f"{path}: only one has {name!r}"
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} items: {left} and {right}"
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(left, float) and isinstance(right, float):
        if abs(left - right) > NEAR:
            yield f"{path}: {left} and {right}"
    elif left != right or type(left) is not type(right):
        yield f"{path}: {left!r} and {right!r}"
