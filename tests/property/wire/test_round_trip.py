"""Every message of the stream survives the wire, and so do frames of any mix of items."""

from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import wire_strategies as some
from tests.engine_builders import make_lease
from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    Lease,
    Leased,
    LoadReport,
    Refused,
    RenewLease,
    RouterMessage,
    Started,
    Submit,
    TokenRun,
    Tokens,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.transport.control import commit_to_wire
from twostroke.cluster.wire import convert, messages
from twostroke.cluster.wire.codec import FRAME_BYTES, Assembly, Outbox, RouterCodec, WorkerCodec
from twostroke.cluster.wire.logprobs import first_logprob_from_wire, logprobs_from_wire
from twostroke.proto.v1 import common_pb2, kv_transfer_pb2, worker_pb2

LEASE = make_lease(2)


@given(some.leases())
def test_a_lease_survives(lease: Lease) -> None:
    wire = common_pb2.Lease.FromString(convert.lease_to_wire(lease).SerializeToString())
    assert convert.lease_from_wire(wire) == lease


@given(some.infos())
def test_a_worker_info_survives(info: WorkerInfo) -> None:
    wire = worker_pb2.WorkerInfo.FromString(messages.info_to_wire(info).SerializeToString())
    assert messages.info_from_wire(wire) == info


@given(some.snapshots())
def test_a_snapshot_survives(snapshot: PrefixSnapshot) -> None:
    parts = messages.snapshot_to_wire(snapshot)
    assert messages.snapshot_from_wire(parts) == snapshot


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(some.submits(), min_size=1, max_size=3, unique_by=lambda submit: submit.job), st.data())
def test_a_conversation_survives(submits: list[Submit], data: st.DataObject) -> None:
    router, worker = RouterCodec(), WorkerCodec()

    # 1. The router submits, renews and cancels.
    said: list[RouterMessage] = [*submits]
    said += [RenewLease(submit.job, data.draw(st.booleans())) for submit in submits]
    said += [Cancel(submit.job) for submit in submits]
    assert [_to_worker(router, worker, message) for message in said] == said

    # 2. The worker answers everything that it may say, ends last.
    jobs = [submit.job for submit in submits]
    answers: list[WorkerMessage] = [data.draw(some.loads())]
    for job in jobs:
        answers.append(Leased(job, data.draw(some.leases())))
        logprob = data.draw(st.none() | some.logprobs())
        answers.append(Started(job, data.draw(some.counts), data.draw(st.none() | some.counts), logprob))
        answers.append(data.draw(some.prompt_logprobs(job)))
    answers.append(Tokens(tuple(data.draw(some.runs(job)) for job in jobs)))
    for job in jobs:
        answers.append(data.draw(st.one_of(some.ends(job), some.refusals(job))))
    assert [_to_router(worker, router, message) for message in answers] == answers

    # 3. Nothing is left of the jobs, and late messages about them are dropped.
    assert len(router.handles) == len(worker.handles) == 0
    assert worker.encode(Started(jobs[0], 0)) is None
    assert router.encode(Cancel(jobs[0])) is None


def _to_worker(router: RouterCodec, worker: WorkerCodec, message: RouterMessage) -> RouterMessage | None:
    item = router.encode(message)
    assert item is not None
    return worker.decode(worker_pb2.RouterItem.FromString(item.SerializeToString()))


def _to_router(worker: WorkerCodec, router: RouterCodec, message: WorkerMessage) -> WorkerMessage | None:
    item = worker.encode(message)
    assert item is not None
    return router.decode(worker_pb2.WorkerItem.FromString(item.SerializeToString()))


def test_a_job_submitted_twice_keeps_its_handle_until_both_are_answered() -> None:
    router, worker = RouterCodec(), WorkerCodec()
    submit = some.submit(prompt=(1, 2, 3))
    for _ in range(2):
        assert _to_worker(router, worker, submit) == submit
    ended = some.ended(submit.job)
    assert _to_router(worker, router, ended) == ended
    tokens = Tokens((TokenRun(submit.job, 0, (7,)),))
    assert _to_router(worker, router, tokens) == tokens
    assert _to_router(worker, router, ended) == ended
    assert len(router.handles) == len(worker.handles) == 0


def test_a_handle_never_means_two_jobs() -> None:
    worker = WorkerCodec()
    first = some.submit(prompt=(1,))
    second = some.submit(prompt=(1,), job=JobId(first.job.request_id, 1, 0))
    worker.decode(worker_pb2.RouterItem(submit=messages.submit_to_wire(first, 1)))
    with pytest.raises(convert.WireError, match="handle 1"):
        worker.decode(worker_pb2.RouterItem(submit=messages.submit_to_wire(second, 1)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 100, 70_000, FRAME_BYTES - 20, FRAME_BYTES, 3 * FRAME_BYTES + 1]), max_size=12))
def test_frames_keep_order_and_stay_small(sizes: list[int]) -> None:
    outbox: Outbox[worker_pb2.WorkerItem] = Outbox(max_bytes=64 << 20)
    items = [
        worker_pb2.WorkerItem(refused=worker_pb2.Refused(handle=number, message="x" * size))
        for number, size in enumerate(sizes)
    ]
    assert all(outbox.put(item) for item in items)

    assembly: Assembly[worker_pb2.WorkerItem] = Assembly(worker_pb2.WorkerItem.FromString)
    arrived: list[worker_pb2.WorkerItem] = []
    while len(outbox):
        taken, fragment, end = outbox.take()
        frame = worker_pb2.WorkerFrame(items=taken, fragment=fragment, fragment_end=end)
        assert 0 < frame.ByteSize() < 1 << 20
        arrived.extend(assembly.feed(list(frame.items), frame.fragment, frame.fragment_end))
    assert arrived == items
    assert outbox.num_bytes == 0


def test_an_outbox_refuses_what_is_over_its_bound() -> None:
    outbox: Outbox[worker_pb2.WorkerItem] = Outbox(max_bytes=1000)
    item = worker_pb2.WorkerItem(refused=worker_pb2.Refused(message="x" * 600))
    assert outbox.put(item)
    assert not outbox.put(item)
    outbox.take()
    assert outbox.put(item)


def test_converters_name_every_field() -> None:
    """A field added to a core message must be added to the wire, or this fails."""
    pairs = [
        (Submit, worker_pb2.Submit, {"handle"}),
        (Ended, worker_pb2.Ended, {"handle"}),
        (LoadReport, worker_pb2.LoadReport, set()),
        (Refused, worker_pb2.Refused, {"handle"}),
    ]
    for core, wire, extra in pairs:
        names = {field.name for field in fields(core)} | extra
        on_wire = set(wire.DESCRIPTOR.fields_by_name)
        assert names - on_wire <= {"job"}, core
        assert on_wire - names == set(), core


@given(st.none() | some.logprobs())
def test_a_commits_log_probability_survives(logprob: TokenLogprob | None) -> None:
    wire = commit_to_wire(LEASE, 7, 3, logprob).SerializeToString()
    assert first_logprob_from_wire(kv_transfer_pb2.CommitPages.FromString(wire)) == logprob


@pytest.mark.parametrize(
    "wire",
    [
        common_pb2.Logprobs(logprob=[-1.0], rank=[1]),
        common_pb2.Logprobs(logprob=[-1.0], rank=[1], num_top=[1]),
        common_pb2.Logprobs(logprob=[-1.0], rank=[1], num_top=[1], top_ids=[4]),
        common_pb2.Logprobs(rank=[1]),
    ],
)
def test_columns_of_log_probabilities_that_do_not_fit_are_refused(wire: common_pb2.Logprobs) -> None:
    with pytest.raises(convert.WireError):
        logprobs_from_wire(wire)
    block = worker_pb2.Tokens(handle=[1], first_index=[0], count=[1], tokens=[5], logprobs=wire, with_logprobs=[0])
    with pytest.raises(convert.WireError):
        RouterCodec().decode(worker_pb2.WorkerItem(tokens=block))


def test_log_probabilities_go_to_the_runs_that_have_them() -> None:
    router, worker = RouterCodec(), WorkerCodec()
    jobs = [JobId(RequestId("r"), number, 1) for number in range(3)]
    for job in jobs:
        _to_worker(router, worker, some.submit(prompt=(1,), job=job))
    told = (TokenLogprob(-0.5, 2, (3,), (-0.25,)), TokenLogprob(-1.0, 1))
    runs = (TokenRun(jobs[0], 0, (7,)), TokenRun(jobs[1], 4, (8, 9), told), TokenRun(jobs[2], 1, (5,), told[:1]))
    assert _to_router(worker, router, Tokens(runs)) == Tokens(runs)
    # A job that has ended on the router's side takes nothing from the others.
    ended = some.ended(jobs[1])
    item = worker.encode(Tokens(runs))
    assert item is not None
    _to_router(worker, router, ended)
    assert router.decode(item) == Tokens((runs[0], runs[2]))
