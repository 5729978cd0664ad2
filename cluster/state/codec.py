"""Registry entries as JSON and prefix batches as stream fields: the only place that knows the stored form."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from twostroke.cluster.core.events import PrefixBatch
from twostroke.cluster.core.ids import Incarnation, PrefixKey, WorkerId
from twostroke.cluster.core.layout import PageGroup, PageLayout
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.cluster.core.prefix import KEY_BYTES


def dump_worker(info: WorkerInfo) -> bytes:
    return json.dumps(asdict(info) | {"role": info.role.value}, separators=(",", ":"), sort_keys=True).encode()


def load_worker(data: bytes) -> WorkerInfo:
    """Raises ValueError for an entry that is not one of ours."""
    try:
        record: dict[str, Any] = json.loads(data)
        layout: dict[str, Any] = record.pop("layout")
        groups = tuple(PageGroup(**group) for group in layout.pop("groups"))
        return WorkerInfo(
            worker_id=WorkerId(record.pop("worker_id")),
            incarnation=Incarnation(record.pop("incarnation")),
            role=Role(record.pop("role")),
            layout=PageLayout(groups=groups, **layout),
            transports=tuple(record.pop("transports")),
            **record,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a registry entry: {error}") from None


def dump_batch(batch: PrefixBatch) -> dict[bytes, bytes]:
    return {
        b"stored": b"".join(batch.stored),
        b"removed": b"".join(batch.removed),
        b"cleared": b"1" if batch.cleared else b"",
    }


def load_batch(incarnation: Incarnation, sequence: int, record: Mapping[bytes, bytes]) -> PrefixBatch:
    """Raises ValueError for fields that are not whole keys."""
    return PrefixBatch(
        incarnation,
        sequence,
        stored=_keys(record.get(b"stored", b"")),
        removed=_keys(record.get(b"removed", b"")),
        cleared=bool(record.get(b"cleared")),
    )


def _keys(data: bytes) -> tuple[PrefixKey, ...]:
    if len(data) % KEY_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole prefix keys")
    return tuple(PrefixKey(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES))
