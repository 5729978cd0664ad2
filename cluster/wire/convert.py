"""Total converters between the messages of `common.proto` and core's plain data.

`x_to_wire` raises ValueError (or struct.error, OverflowError) only for values that no valid core object has;
`x_from_wire` raises `WireError` for a message that no peer of this version sends.
"""

import struct
from collections.abc import Sequence
from typing import cast

from twostroke.cluster.core.errors import TwostrokeError
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, RequestId, WorkerId
from twostroke.cluster.core.layout import PageGroup, PageLayout
from twostroke.cluster.core.messages import Lease, LeaseShard
from twostroke.cluster.core.sampling import FinishReason, SamplingParams
from twostroke.proto.v1 import common_pb2 as pb


class WireError(TwostrokeError):
    """The peer sent what this version cannot understand."""

    code = "wire"


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32le. Raises struct.error for an id that does not fit."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def tokens_from_bytes(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are no whole number of token ids")
    return struct.unpack(f"<{len(data) // 4}I", data)


# ----------------------------------------------------------------------------------------------------- ids


def job_to_wire(job: JobId) -> pb.JobId:
    return pb.JobId(request_id=job.request_id, choice=job.choice, attempt=job.attempt)


def job_from_wire(job: pb.JobId) -> JobId:
    return JobId(RequestId(job.request_id), job.choice, job.attempt)


# -------------------------------------------------------------------------------------------------- layout


def layout_to_wire(layout: PageLayout) -> pb.PageLayout:
    return pb.PageLayout(
        protocol_version=layout.protocol_version,
        model_fingerprint=layout.model_fingerprint,
        page_size=layout.page_size,
        rope=layout.rope,
        quantization=layout.quantization,
        groups=[_group_to_wire(group) for group in layout.groups],
    )


def layout_from_wire(layout: pb.PageLayout) -> PageLayout:
    return PageLayout(
        protocol_version=layout.protocol_version,
        model_fingerprint=layout.model_fingerprint,
        page_size=layout.page_size,
        rope=layout.rope,
        quantization=layout.quantization,
        groups=tuple(_group_from_wire(group) for group in layout.groups),
    )


def _group_to_wire(group: PageGroup) -> pb.PageGroup:
    return pb.PageGroup(
        kind=group.kind,
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        scale_dtype=group.scale_dtype,
        offset_bytes=group.offset_bytes,
        stride_bytes=group.stride_bytes,
    )


def _group_from_wire(group: pb.PageGroup) -> PageGroup:
    return PageGroup(
        kind=group.kind,
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        scale_dtype=group.scale_dtype,
        offset_bytes=group.offset_bytes,
        stride_bytes=group.stride_bytes,
    )


# ------------------------------------------------------------------------------------------------ sampling


def sampling_to_wire(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        end_token_ids=sampling.end_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        grammar=None if sampling.grammar is None else grammar_to_wire(sampling.grammar),
        bias_ids=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_wire(sampling: pb.SamplingParams) -> SamplingParams:
    if len(sampling.bias_ids) != len(sampling.biases):
        raise WireError(f"{len(sampling.biases)} biases for {len(sampling.bias_ids)} tokens")
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        end_token_ids=tuple(sampling.end_token_ids),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        grammar=grammar_from_wire(sampling.grammar) if sampling.HasField("grammar") else None,
        logit_bias=tuple(zip(sampling.bias_ids, sampling.biases, strict=True)),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


_GRAMMAR_TO_WIRE = {
    GrammarKind.JSON_SCHEMA: pb.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: pb.GRAMMAR_KIND_REGEX,
    GrammarKind.CHOICE: pb.GRAMMAR_KIND_CHOICE,
    GrammarKind.GRAMMAR: pb.GRAMMAR_KIND_GRAMMAR,
}
_GRAMMAR_FROM_WIRE: dict[int, GrammarKind] = {wire: kind for kind, wire in _GRAMMAR_TO_WIRE.items()}


def grammar_to_wire(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=_GRAMMAR_TO_WIRE[grammar.kind], text=grammar.text, compact=grammar.compact)


def grammar_from_wire(grammar: pb.Grammar) -> Grammar:
    kind = _GRAMMAR_FROM_WIRE.get(grammar.kind)
    if kind is None:
        raise WireError(f"unknown kind of grammar {grammar.kind}")
    return Grammar(kind, grammar.text, grammar.compact)


_FINISH_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def finish_to_wire(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_WIRE[reason]


def finish_from_wire(reason: pb.FinishReason) -> FinishReason | None:
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    if reason not in _FINISH_FROM_WIRE:
        raise WireError(f"unknown finish reason {reason}")
    return _FINISH_FROM_WIRE[reason]


# --------------------------------------------------------------------------------------------------- lease


def lease_to_wire(lease: Lease) -> pb.Lease:
    return pb.Lease(
        lease_id=lease.lease_id,
        job=job_to_wire(lease.job),
        epoch=lease.epoch,
        nonce=lease.nonce,
        worker_id=lease.worker_id,
        incarnation=lease.incarnation,
        layout=layout_to_wire(lease.layout),
        transports=lease.transports,
        device=lease.device,
        num_held=lease.num_held,
        shards=[_shard_to_wire(shard) for shard in lease.shards],
        ttl_s=lease.ttl_s,
    )


def lease_from_wire(lease: pb.Lease) -> Lease:
    if not lease.shards:
        raise WireError(f"lease {lease.lease_id!r} has no shard")
    return Lease(
        lease_id=LeaseId(lease.lease_id),
        job=job_from_wire(lease.job),
        epoch=lease.epoch,
        nonce=lease.nonce,
        worker_id=WorkerId(lease.worker_id),
        incarnation=Incarnation(lease.incarnation),
        layout=layout_from_wire(lease.layout),
        transports=tuple(lease.transports),
        device=lease.device,
        num_held=lease.num_held,
        shards=tuple(_shard_from_wire(shard) for shard in lease.shards),
        ttl_s=lease.ttl_s,
    )


def _shard_to_wire(shard: LeaseShard) -> pb.LeaseShard:
    return pb.LeaseShard(
        rank=shard.rank,
        address=shard.address,
        head_start=shard.head_start,
        head_end=shard.head_end,
        pages=shard.pages,
    )


def _shard_from_wire(shard: pb.LeaseShard) -> LeaseShard:
    return LeaseShard(
        rank=shard.rank,
        address=shard.address,
        head_start=shard.head_start,
        head_end=shard.head_end,
        pages=cast(tuple[PageId, ...], tuple(shard.pages)),
    )
