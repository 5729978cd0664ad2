"""Log-probabilities on the wire, in columns. Total converters, as in `wire.convert`."""

from collections.abc import Sequence

from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.wire.convert import WireError
from twostroke.proto.v1 import common_pb2, kv_transfer_pb2, worker_pb2


def logprobs_to_wire(values: Sequence[TokenLogprob]) -> common_pb2.Logprobs:
    wire = common_pb2.Logprobs(
        logprob=[value.logprob for value in values],
        rank=[value.rank for value in values],
        num_top=[len(value.top_ids) for value in values],
    )
    for value in values:
        wire.top_ids.extend(value.top_ids)
        wire.top.extend(value.top)
    return wire


def logprobs_from_wire(wire: common_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    """Raises WireError for columns that do not fit together."""
    num_tokens = len(wire.logprob)
    num_top = sum(wire.num_top)
    if (len(wire.rank), len(wire.num_top)) != (num_tokens,) * 2 or (len(wire.top_ids), len(wire.top)) != (num_top,) * 2:
        raise WireError(f"columns of log-probabilities of {num_tokens} tokens do not fit together")
    top_ids, top = tuple(wire.top_ids), tuple(wire.top)
    values: list[TokenLogprob] = []
    start = 0
    for logprob, rank, count in zip(wire.logprob, wire.rank, wire.num_top, strict=True):
        end = start + count
        values.append(TokenLogprob(logprob, rank, top_ids[start:end], top[start:end]))
        start = end
    return tuple(values)


def first_logprob_from_wire(message: kv_transfer_pb2.CommitPages | worker_pb2.Started) -> TokenLogprob | None:
    """Raises WireError unless it is of one token, if there is any."""
    if not message.HasField("first_logprob"):
        return None
    values = logprobs_from_wire(message.first_logprob)
    if len(values) != 1:
        raise WireError(f"log-probabilities of {len(values)} first tokens")
    return values[0]


def show_token(data: bytes) -> str:
    """A token's bytes as text; what is no whole characters as `bytes:\\xe2\\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)
