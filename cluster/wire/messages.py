"""Converters between `worker.proto` and `core.messages`, for everything that needs no stream state.

Messages about a job carry the handle that the job has on this stream; `cluster.wire.codec` owns the handles.
"""

from collections.abc import Sequence

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.ids import Incarnation, JobId, PrefixKey, WorkerId
from twostroke.cluster.core.messages import (
    Ended,
    JobTimings,
    Ledger,
    LoadReport,
    Outcome,
    RefusalReason,
    Role,
    Stroke,
    Submit,
    WorkerCheck,
    WorkerInfo,
)
from twostroke.cluster.core.prefix import KEY_BYTES
from twostroke.cluster.wire.convert import (
    WireError,
    finish_from_wire,
    finish_to_wire,
    job_from_wire,
    job_to_wire,
    layout_from_wire,
    layout_to_wire,
    lease_from_wire,
    lease_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    tokens_from_bytes,
    tokens_to_bytes,
)
from twostroke.proto.v1 import worker_pb2 as pb

_ROLE = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_STROKE = {
    Stroke.RESERVE: pb.STROKE_RESERVE,
    Stroke.PREFILL: pb.STROKE_PREFILL,
    Stroke.LOCAL: pb.STROKE_LOCAL,
}
_REFUSAL = {
    RefusalReason.NO_PAGES: pb.REFUSAL_REASON_NO_PAGES,
    RefusalReason.QUEUE_FULL: pb.REFUSAL_REASON_QUEUE_FULL,
    RefusalReason.DRAINING: pb.REFUSAL_REASON_DRAINING,
    RefusalReason.TOO_LARGE: pb.REFUSAL_REASON_TOO_LARGE,
    RefusalReason.LAYOUT: pb.REFUSAL_REASON_LAYOUT,
    RefusalReason.WRONG_ROLE: pb.REFUSAL_REASON_WRONG_ROLE,
    RefusalReason.BAD_SUBMIT: pb.REFUSAL_REASON_BAD_SUBMIT,
}
_OUTCOME = {
    Outcome.FINISHED: pb.OUTCOME_FINISHED,
    Outcome.HANDED_OVER: pb.OUTCOME_HANDED_OVER,
    Outcome.CANCELLED: pb.OUTCOME_CANCELLED,
    Outcome.EXPIRED: pb.OUTCOME_EXPIRED,
    Outcome.PREEMPTED: pb.OUTCOME_PREEMPTED,
    Outcome.TRANSFER_FAILED: pb.OUTCOME_TRANSFER_FAILED,
    Outcome.FAILED: pb.OUTCOME_FAILED,
    Outcome.BROKEN_GRAMMAR: pb.OUTCOME_BROKEN_GRAMMAR,
}
_ROLE_BACK: dict[int, Role] = {wire: role for role, wire in _ROLE.items()}
_STROKE_BACK: dict[int, Stroke] = {wire: stroke for stroke, wire in _STROKE.items()}
_REFUSAL_BACK: dict[int, RefusalReason] = {wire: reason for reason, wire in _REFUSAL.items()}
_OUTCOME_BACK: dict[int, Outcome] = {wire: outcome for outcome, wire in _OUTCOME.items()}


def info_to_wire(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLE[info.role],
        address=info.address,
        model=info.model,
        layout=layout_to_wire(info.layout),
        num_pages=info.num_pages,
        max_context=info.max_context,
        chunk_tokens=info.chunk_tokens,
        transports=info.transports,
        device=info.device,
        weight_bytes=info.weight_bytes,
    )


def info_from_wire(info: pb.WorkerInfo) -> WorkerInfo:
    role = _ROLE_BACK.get(info.role)
    if role is None or not info.incarnation:
        raise WireError(f"no worker describes itself with role {info.role} and incarnation {info.incarnation!r}")
    return WorkerInfo(
        worker_id=WorkerId(info.worker_id),
        incarnation=Incarnation(info.incarnation),
        role=role,
        address=info.address,
        model=info.model,
        layout=layout_from_wire(info.layout),
        num_pages=info.num_pages,
        max_context=info.max_context,
        chunk_tokens=info.chunk_tokens,
        transports=tuple(info.transports),
        device=info.device,
        weight_bytes=info.weight_bytes,
    )


def submit_to_wire(submit: Submit, handle: int) -> pb.Submit:
    return pb.Submit(
        handle=handle,
        job=job_to_wire(submit.job),
        stroke=_STROKE[submit.stroke],
        prompt=tokens_to_bytes(submit.prompt),
        delivered=tokens_to_bytes(submit.delivered),
        sampling=sampling_to_wire(submit.sampling),
        time_left_s=submit.time_left_s,
        salt=submit.salt,
        adapter=submit.adapter,
        lease=None if submit.lease is None else lease_to_wire(submit.lease),
    )


def submit_from_wire(submit: pb.Submit) -> Submit:
    stroke = _STROKE_BACK.get(submit.stroke)
    if stroke is None:
        raise WireError(f"unknown stroke {submit.stroke}")
    return Submit(
        job=job_from_wire(submit.job),
        stroke=stroke,
        prompt=tokens_from_bytes(submit.prompt),
        delivered=tokens_from_bytes(submit.delivered),
        sampling=sampling_from_wire(submit.sampling),
        time_left_s=submit.time_left_s,
        salt=submit.salt,
        adapter=submit.adapter,
        lease=lease_from_wire(submit.lease) if submit.HasField("lease") else None,
    )


def refusal_to_wire(reason: RefusalReason) -> pb.RefusalReason:
    return _REFUSAL[reason]


def refusal_from_wire(reason: int) -> RefusalReason:
    if reason not in _REFUSAL_BACK:
        raise WireError(f"unknown refusal reason {reason}")
    return _REFUSAL_BACK[reason]


def ended_to_wire(ended: Ended, handle: int) -> pb.Ended:
    timings = ended.timings
    return pb.Ended(
        handle=handle,
        outcome=_OUTCOME[ended.outcome],
        finish_reason=finish_to_wire(ended.finish_reason),
        num_output=ended.num_output,
        message=ended.message,
        timings=pb.JobTimings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            transfer_busy_s=timings.transfer_busy_s,
            transfer_exposed_s=timings.transfer_exposed_s,
            decode_s=timings.decode_s,
            cached_tokens=timings.cached_tokens,
            computed_tokens=timings.computed_tokens,
            pages_shipped=timings.pages_shipped,
            bytes_shipped=timings.bytes_shipped,
            transport=timings.transport,
            preemptions=timings.preemptions,
        ),
    )


def ended_from_wire(ended: pb.Ended, job: JobId) -> Ended:
    outcome = _OUTCOME_BACK.get(ended.outcome)
    if outcome is None:
        raise WireError(f"unknown outcome {ended.outcome}")
    timings = ended.timings
    return Ended(
        job=job,
        outcome=outcome,
        finish_reason=finish_from_wire(ended.finish_reason),
        num_output=ended.num_output,
        message=ended.message,
        timings=JobTimings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            transfer_busy_s=timings.transfer_busy_s,
            transfer_exposed_s=timings.transfer_exposed_s,
            decode_s=timings.decode_s,
            cached_tokens=timings.cached_tokens,
            computed_tokens=timings.computed_tokens,
            pages_shipped=timings.pages_shipped,
            bytes_shipped=timings.bytes_shipped,
            transport=timings.transport,
            preemptions=timings.preemptions,
        ),
    )


def load_to_wire(load: LoadReport) -> pb.LoadReport:
    ledger = load.ledger
    return pb.LoadReport(
        ledger=pb.Ledger(
            free=ledger.free,
            cached=ledger.cached,
            active=ledger.active,
            leased=ledger.leased,
            quarantined=ledger.quarantined,
        ),
        running=load.running,
        waiting=load.waiting,
        leases=load.leases,
        queued_tokens=load.queued_tokens,
        step_age_s=load.step_age_s,
        num_steps=load.num_steps,
        event_sequence=load.event_sequence,
        draining=load.draining,
        generated_tokens=load.generated_tokens,
    )


def load_from_wire(load: pb.LoadReport) -> LoadReport:
    ledger = load.ledger
    return LoadReport(
        ledger=Ledger(
            free=ledger.free,
            cached=ledger.cached,
            active=ledger.active,
            leased=ledger.leased,
            quarantined=ledger.quarantined,
        ),
        running=load.running,
        waiting=load.waiting,
        leases=load.leases,
        queued_tokens=load.queued_tokens,
        step_age_s=load.step_age_s,
        num_steps=load.num_steps,
        event_sequence=load.event_sequence,
        draining=load.draining,
        generated_tokens=load.generated_tokens,
    )


def check_to_wire(check: WorkerCheck) -> pb.CheckReply:
    return pb.CheckReply(load=load_to_wire(check.load), fault=check.fault, transfers=check.transfers)


def check_from_wire(reply: pb.CheckReply) -> WorkerCheck:
    return WorkerCheck(load_from_wire(reply.load), reply.fault, reply.transfers)


PART_KEYS = (512 << 10) // KEY_BYTES
"""Keys in one part of a snapshot: 512 KiB."""


def snapshot_to_wire(snapshot: PrefixSnapshot) -> list[pb.SnapshotPart]:
    """At least one part, also when nothing is named, so that the sequence arrives."""
    return [
        pb.SnapshotPart(
            incarnation=snapshot.incarnation,
            sequence=snapshot.sequence,
            keys=b"".join(snapshot.keys[start : start + PART_KEYS]),
        )
        for start in range(0, max(1, len(snapshot.keys)), PART_KEYS)
    ]


def snapshot_from_wire(parts: Sequence[pb.SnapshotPart]) -> PrefixSnapshot:
    """Raises WireError when the parts are none, or not of one snapshot."""
    if not parts:
        raise WireError("a snapshot without parts")
    first = parts[0]
    keys: list[PrefixKey] = []
    for part in parts:
        if (part.incarnation, part.sequence) != (first.incarnation, first.sequence) or len(part.keys) % KEY_BYTES:
            raise WireError("parts of different snapshots, or a part cut within a key")
        data = part.keys
        keys.extend(PrefixKey(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES))
    return PrefixSnapshot(Incarnation(first.incarnation), first.sequence, tuple(keys))
