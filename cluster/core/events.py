"""Prefix-cache events: how a worker tells routers which pages it has named and forgotten.

A worker numbers its batches 1, 2, 3, ... within its incarnation and publishes them to the event log; a router
folds them into its index. A gap, or a lag, is healed by a snapshot, which carries the sequence it is true at:
apply the snapshot, then only batches with a larger sequence (FIELD-REPORTS D9-D11, invariant 16).
"""

from twostroke.cluster.core.ids import Incarnation, PrefixKey
from twostroke.cluster.core.records import dataclass


@dataclass(frozen=True, slots=True)
class PrefixBatch:
    """One step's changes, in this order: `cleared` first, then removed, then stored.

    Removing an absent key and storing a present one are no-ops.
    """

    incarnation: Incarnation
    sequence: int
    stored: tuple[PrefixKey, ...] = ()
    removed: tuple[PrefixKey, ...] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All named pages of a worker as of batch `sequence`."""

    incarnation: Incarnation
    sequence: int
    keys: tuple[PrefixKey, ...]
