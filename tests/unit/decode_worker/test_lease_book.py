"""The lease book, step by step along the life in its docstring."""

import pytest

from tests.transfer_builders import LAYOUT, DecodeSide, commit_of, make_layout, make_lease, renewed, write_of
from twostroke.cluster.core.clock import ManualClock
from twostroke.cluster.core.errors import InternalError, TransferFailed
from twostroke.cluster.core.messages import Lease
from twostroke.cluster.transport.base import PageWrite
from twostroke.decode_worker.intake import REMEMBERED_COMMITS
from twostroke.engine.commands import LeaseRenewed


def opened(pages: list[int]) -> tuple[DecodeSide, Lease]:
    side = DecodeSide(clock=ManualClock())
    lease = make_lease(pages)
    side.book.open(lease)
    return side, lease


def write(side: DecodeSide, lease: Lease, first: int, count: int, verified: bool = True) -> None:
    ticket = side.book.begin(write_of(lease, first, count))
    side.book.land(ticket)
    side.book.end(ticket, verified)


def test_a_whole_transfer_hands_the_job_over_once() -> None:
    side, lease = opened([5, 3, 9])
    ticket = side.book.begin(write_of(lease, 1, 2))
    assert ticket.pages == (3, 9)
    side.book.end(ticket, verified=True)
    write(side, lease, 0, 1)

    assert side.book.commit(commit_of(lease)) == lease.job
    assert side.book.commit(commit_of(lease)) == lease.job
    assert [event.first_token for event in side.committed] == [7]

    side.book.close(lease.lease_id, committed=True)
    assert side.book.commit(commit_of(lease)) == lease.job  # remembered after the end
    assert len(side.committed) == 1
    assert side.released == []
    side.assert_at_rest()


def test_a_lease_without_pages_commits() -> None:
    side, lease = opened([])
    write(side, lease, 0, 0)
    side.book.commit(commit_of(lease))
    assert len(side.committed) == 1


def test_a_commit_needs_every_page_verified() -> None:
    side, lease = opened([0, 1, 2])
    write(side, lease, 0, 2)
    with pytest.raises(TransferFailed, match="1 of 3 pages are not verified, first 2"):
        side.book.commit(commit_of(lease))
    write(side, lease, 2, 1, verified=False)
    with pytest.raises(TransferFailed, match="not verified"):
        side.book.commit(commit_of(lease))
    write(side, lease, 2, 1)
    ticket = side.book.begin(write_of(lease, 0, 1))  # a repeated write under way
    with pytest.raises(TransferFailed, match="not verified"):
        side.book.commit(commit_of(lease))
    side.book.end(ticket, verified=True)
    with pytest.raises(TransferFailed, match="commit names 2 pages, not 3"):
        side.book.commit(commit_of(lease, num_pages=2))
    side.book.commit(commit_of(lease))


def test_a_different_commit_after_the_first_is_refused() -> None:
    side, lease = opened([0])
    write(side, lease, 0, 1)
    side.book.commit(commit_of(lease, token=7))
    with pytest.raises(TransferFailed, match="other contents"):
        side.book.commit(commit_of(lease, token=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lease_id": "other"}, "unknown"),
        ({"nonce": b"0123456789abcdeX"}, "nonce"),
        ({"nonce": b""}, "nonce"),
        ({"epoch": 1}, "epoch 1"),
        ({"first": 3}, "outside"),
        ({"first": -1}, "outside"),
        ({"count": 4}, "outside"),
        ({"count": -1}, "outside"),
    ],
)
def test_a_write_with_wrong_credentials_or_range_is_refused(change: dict[str, object], message: str) -> None:
    side, lease = opened([0, 1, 2])
    fields: dict[str, object] = {
        "lease_id": lease.lease_id, "epoch": 0, "nonce": lease.nonce, "first": 0, "count": 1
    }  # fmt: skip
    with pytest.raises(TransferFailed, match=message):
        side.book.begin(PageWrite(**(fields | change)))  # type: ignore[arg-type]
    assert side.book.num_writes == 0


def test_nobody_writes_after_the_commit() -> None:
    side, lease = opened([0])
    write(side, lease, 0, 1)
    side.book.commit(commit_of(lease))
    with pytest.raises(TransferFailed, match="committed"):
        side.book.begin(write_of(lease, 0, 1))


def test_a_page_has_one_writer_at_a_time() -> None:
    side, lease = opened([0, 1, 2])
    ticket = side.book.begin(write_of(lease, 1, 1))
    with pytest.raises(TransferFailed, match="under way"):
        side.book.begin(write_of(lease, 0, 3))
    side.book.end(ticket, verified=True)
    write(side, lease, 0, 3)


def test_a_renewal_discards_everything_and_refuses_the_old_writer() -> None:
    side, lease = opened([0, 1])
    write(side, lease, 0, 2)
    newer = renewed(lease)
    side.book.open(newer)
    assert side.renewals == [LeaseRenewed(lease.lease_id, 1)]

    with pytest.raises(TransferFailed, match="epoch 0, the lease is at 1"):
        side.book.begin(write_of(lease, 0, 1))
    with pytest.raises(TransferFailed, match="epoch 0"):
        side.book.commit(commit_of(lease))
    with pytest.raises(TransferFailed, match="2 of 2 pages"):
        side.book.commit(commit_of(newer))
    write(side, newer, 0, 2)
    side.book.commit(commit_of(newer))
    assert [event.epoch for event in side.committed] == [1]


def test_an_old_write_that_lands_blocks_its_pages_and_verifies_nothing() -> None:
    side, lease = opened([0, 1])
    stuck = side.book.begin(write_of(lease, 0, 1))
    side.book.land(stuck)
    newer = renewed(lease)
    side.book.open(newer)

    with pytest.raises(TransferFailed, match="under way"):
        side.book.begin(write_of(newer, 0, 2))
    write(side, newer, 1, 1)
    side.book.end(stuck, verified=True)
    with pytest.raises(TransferFailed, match="1 of 2 pages are not verified, first 0"):
        side.book.commit(commit_of(newer))
    write(side, newer, 0, 1)
    side.book.commit(commit_of(newer))


def test_an_old_write_that_has_not_landed_holds_nobody_up() -> None:
    """Its writer froze in the middle of its bytes and may wake at any time."""
    side, lease = opened([0, 1])
    frozen = side.book.begin(write_of(lease, 0, 2))
    newer = renewed(lease)
    side.book.open(newer)
    with pytest.raises(TransferFailed, match="epoch 0, the lease is at 1"):
        side.book.land(frozen)

    write(side, newer, 0, 2)
    side.book.end(frozen, verified=False)  # takes nothing back that is another's
    side.book.commit(commit_of(newer))
    side.book.close(lease.lease_id, committed=True)
    side.assert_at_rest()


@pytest.mark.parametrize("committed", [True, False])
def test_a_lease_ends_though_a_frozen_writer_never_did(committed: bool) -> None:
    side, lease = opened([0])
    frozen = side.book.begin(write_of(lease, 0, 1))
    newer = renewed(lease)
    side.book.open(newer)
    if committed:
        write(side, newer, 0, 1)
        side.book.commit(commit_of(newer))
    side.book.close(lease.lease_id, committed)
    assert side.released == ([] if committed else [lease.lease_id])
    with pytest.raises(TransferFailed, match="ended"):
        side.book.land(frozen)
    side.book.end(frozen, verified=False)
    assert side.released == ([] if committed else [lease.lease_id])
    side.assert_at_rest()


def test_a_commit_that_came_before_the_renewal_stands() -> None:
    side, lease = opened([0])
    write(side, lease, 0, 1)
    side.book.commit(commit_of(lease))
    side.book.open(renewed(lease))
    assert side.renewals == []  # nobody may be told of credentials that would be refused

    with pytest.raises(TransferFailed, match="committed"):
        side.book.begin(write_of(renewed(lease), 0, 1))
    side.book.close(lease.lease_id, committed=True)
    side.assert_at_rest()


def test_an_uncommitted_end_waits_for_the_last_write_that_lands() -> None:
    side, lease = opened([0, 1])
    first = side.book.begin(write_of(lease, 0, 1))
    second = side.book.begin(write_of(lease, 1, 1))
    side.book.land(first)
    side.book.land(second)
    side.book.close(lease.lease_id, committed=False)
    with pytest.raises(TransferFailed, match="ended"):
        side.book.begin(write_of(lease, 0, 0))

    side.book.end(first, verified=True)
    assert side.released == []
    side.book.end(second, verified=False)
    assert side.released == [lease.lease_id]
    assert side.touched == []
    side.assert_at_rest()


def test_an_uncommitted_end_without_writes_releases_at_once() -> None:
    side, lease = opened([0])
    side.book.close(lease.lease_id, committed=False)
    assert side.released == [lease.lease_id]
    with pytest.raises(TransferFailed, match="unknown or ended"):
        side.book.commit(commit_of(lease))
    side.assert_at_rest()


def test_an_abort_ends_the_epoch_and_not_the_lease() -> None:
    side, lease = opened([0])
    side.book.abort(lease.lease_id, lease.epoch, lease.nonce, "first token was the end")
    with pytest.raises(TransferFailed, match="gave up: first token"):
        side.book.begin(write_of(lease, 0, 1))
    side.book.open(renewed(lease))
    write(side, renewed(lease), 0, 1)
    side.book.commit(commit_of(renewed(lease)))


def test_accepted_chunks_touch_the_lease_at_most_twice_a_second() -> None:
    clock = ManualClock()
    side = DecodeSide(clock=clock)
    lease = make_lease(list(range(8)))
    side.book.open(lease)
    write(side, lease, 0, 1, verified=False)
    assert side.touched == []
    for page in range(8):  # at 0.0, 0.2, ... 1.4 s
        write(side, lease, page, 1)
        clock.advance(0.2)
    assert len(side.touched) == 3  # 0.0, 0.6, 1.2


def test_engine_mistakes_are_internal_errors() -> None:
    side, lease = opened([0])
    ticket = side.book.begin(write_of(lease, 0, 1))
    with pytest.raises(InternalError, match="not a renewal"):
        side.book.open(lease)
    with pytest.raises(InternalError, match="never committed"):
        side.book.close(lease.lease_id, committed=True)
    with pytest.raises(InternalError, match="page_size"):
        side.book.open(make_lease([0], layout=make_layout(128)))
    side.book.end(ticket, verified=True)
    for again in (lambda: side.book.end(ticket, verified=True), lambda: side.book.land(ticket)):
        with pytest.raises(InternalError, match="already ended"):
            again()
    side.book.close(lease.lease_id, committed=False)
    with pytest.raises(InternalError, match="not open"):
        side.book.close(lease.lease_id, committed=False)


def test_remembered_commits_are_bounded() -> None:
    side = DecodeSide(layout=LAYOUT)
    leases = [make_lease([]) for _ in range(REMEMBERED_COMMITS + 1)]
    for lease in leases:
        side.book.open(lease)
        side.book.commit(commit_of(lease))
        side.book.close(lease.lease_id, committed=True)
    side.book.commit(commit_of(leases[1]))
    with pytest.raises(TransferFailed, match="unknown"):
        side.book.commit(commit_of(leases[0]))
