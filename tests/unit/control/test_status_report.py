"""What `status` says of a process."""

from dataclasses import replace

from twostroke.cluster.control.child import ChildView
from twostroke.cluster.control.status_report import (
    COLUMNS,
    ROUTER_LIMIT_BYTES,
    WORKER_EXTRA_BYTES,
    report_process,
)
from twostroke.cluster.control.supervisor import MemberState
from twostroke.cluster.core.ids import WorkerId
from twostroke.cluster.core.messages import Ledger, LoadReport

MIB = 1 << 20
READY = {"incarnation": "ab", "weight_bytes": 300 * MIB, "pool_bytes": 100 * MIB}
WORKER = ChildView(WorkerId("decode-0"), "decode", MemberState.READY, 7, 1, "", 900 * MIB, "", 0, READY)
LOAD = LoadReport(Ledger(5, 4, 3, 2, 1), 6, 2, 1, 0, 0.0, 9, 0, draining=False)


def cells(view: ChildView, load: LoadReport | None) -> dict[str, str]:
    return dict(zip(COLUMNS, report_process(view, load).cells(), strict=True))


def test_a_worker_may_take_its_weights_its_pool_and_a_fixed_extra() -> None:
    report = report_process(WORKER, LOAD)
    assert report.limit_bytes == 400 * MIB + WORKER_EXTRA_BYTES
    shown = cells(WORKER, LOAD)
    assert (shown["memory"], shown["limit"]) == ("900 MiB", "972 MiB")
    assert (shown["weights"], shown["pool"]) == ("300 MiB", "100 MiB")
    assert shown["run/wait"] == "6/2"
    assert shown["free/cached/active/leased/quar."] == "5/4/3/2/1"
    assert cells(replace(WORKER, rss_bytes=973 * MIB), LOAD)["memory"] == "973 MiB OVER"


def test_a_worker_that_is_not_ready_has_no_limit_yet() -> None:
    starting = replace(WORKER, state=MemberState.STARTING, ready={})
    assert report_process(starting, None).limit_bytes is None
    assert cells(starting, None)["weights"] == "-"


def test_a_router_has_a_limit_of_its_own() -> None:
    router = replace(WORKER, role="router", ready={"http": "127.0.0.1:1"})
    assert report_process(router, None).limit_bytes == ROUTER_LIMIT_BYTES


def test_a_ready_worker_that_says_it_drains_is_draining() -> None:
    assert report_process(WORKER, replace(LOAD, draining=True)).state == "draining"
    assert report_process(replace(WORKER, state=MemberState.LOST), LOAD).state == "lost"
