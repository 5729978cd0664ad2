"""Errors in a client's own words, where an endpoint calls a parameter otherwise than `router.prepare` does."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from twostroke.cluster.core.errors import InvalidRequest


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequest from inside names the client's field: `stop[1]` becomes `stop_sequences[1]`."""
    try:
        yield
    except InvalidRequest as error:
        root, bracket, rest = (error.field or "").partition("[")
        if root in names:
            if error.message.startswith(root):
                error.message = names[root] + error.message.removeprefix(root)
            error.field = names[root] + bracket + rest
        raise


@contextmanager
def rewritten(names: Iterable[tuple[str, str]]) -> Iterator[None]:
    """An InvalidRequest from inside names the client's field: pieces of its path are replaced, one after the other."""
    try:
        yield
    except InvalidRequest as error:
        for own, theirs in names:
            error.field = (error.field or "").replace(own, theirs) or None
        raise
