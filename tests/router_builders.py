"""Builders with defaults for the tests of the router and of the cluster's state."""

from typing import Any

from twostroke.cluster.core.ids import Incarnation, WorkerId
from twostroke.cluster.core.layout import PageLayout, gqa_layout
from twostroke.cluster.core.messages import Role, WorkerInfo
from twostroke.router.policy import WorkerView


def fake_layout(page_size: int = 4, model_fingerprint: str = "fake") -> PageLayout:
    return gqa_layout(
        model_fingerprint=model_fingerprint, layers=1, kv_heads=1, head_dim=1, dtype="uint32", page_size=page_size
    )


def worker_info(
    worker_id: str,
    *,
    incarnation: str = "",
    layout: PageLayout | None = None,
    num_pages: int = 64,
    max_context: int = 256,
    chunk_tokens: int = 16,
) -> WorkerInfo:
    """A worker whose role is the first part of its id: `prefill-0`, `decode-1`."""
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation or f"{worker_id}-life"),
        role=Role(worker_id.split("-")[0]),
        address="127.0.0.1:1",
        model="fake",
        layout=layout or fake_layout(),
        num_pages=num_pages,
        max_context=max_context,
        chunk_tokens=chunk_tokens,
        transports=("loopback",),
    )


def view(worker_id: str, **changes: Any) -> WorkerView:
    """A worker view; `layout`, `max_context` and `chunk_tokens` go to its info, the rest to the view."""
    about = {name: changes.pop(name) for name in ("layout", "max_context", "chunk_tokens") if name in changes}
    return WorkerView(worker_info(worker_id, **about), **changes)
