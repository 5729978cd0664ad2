"""Identifiers. Distinct types, so that a checker refuses one where another belongs.

An address is never an identity: a worker is known by its `Incarnation`, which is new in every life of its
process (FIELD-REPORTS invariant 15).
"""

import secrets
from typing import NamedTuple, NewType

from twostroke.cluster.core.random import draw_bytes

RequestId = NewType("RequestId", str)
"""What a client asked for. Made once by the router; a client's own id is only carried beside it."""
WorkerId = NewType("WorkerId", str)
"""A worker's stable name, for example `prefill-0`; survives restarts, so it is never used to match state."""
Incarnation = NewType("Incarnation", str)
"""One life of a process (worker or router)."""
LeaseId = NewType("LeaseId", str)
PageId = NewType("PageId", int)
"""Index of a page in one worker's pool, 0 <= page < num_pages."""
PrefixKey = NewType("PrefixKey", bytes)
"""16 bytes, see `core.prefix`."""


class JobId(NamedTuple):
    """One attempt at one choice of a request. The same on every worker that works on the attempt."""

    request_id: RequestId
    choice: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}.{self.attempt}"


def new_request_id() -> RequestId:
    return RequestId(draw_bytes(12).hex())


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_lease_id() -> LeaseId:
    return LeaseId(secrets.token_hex(8))
