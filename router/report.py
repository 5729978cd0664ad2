"""The account of a request at its end: usage and phases for the client, one log line, and the metrics.

The phases are choice 0's, on the router's clock. They are sums of disjoint intervals that cover the request from
acceptance to its end, so they add up to its duration.
"""

import structlog

from twostroke.cluster.core.errors import Cancelled, TwostrokeError
from twostroke.cluster.core.request import Phase
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.record import ChoiceRecord, RequestRecord
from twostroke.router.request import RequestReport

log = structlog.get_logger(__name__)


def make_report(record: RequestRecord, now: float) -> RequestReport:
    """Also legal for a request that failed: then it tells how far it came."""
    first = record.choices[0]
    spent = dict(first.state.spent_s)
    # Choice 0 may have ended before the others: what they still did is decoding, seen from the request.
    phase = first.state.phase if first.state.live else Phase.DECODING
    spent[phase] = spent.get(phase, 0.0) + now - first.state.since
    prefill, decode = first.prefill_timings, first.decode_timings
    return RequestReport(
        prompt_tokens=len(record.request.prompt),
        completion_tokens=sum(num_output(choice) for choice in record.choices),
        cached_tokens=max(0, min(first.cached_tokens or 0, len(record.request.prompt))),
        duration_ms=1000 * (now - record.accepted_at),
        ttft_ms=0.0 if first.first_token_at is None else 1000 * (first.first_token_at - record.accepted_at),
        itl_ms=_itl_ms(first),
        queue_ms=1000 * (spent.get(Phase.QUEUED, 0.0) - record.route_s),
        route_ms=1000 * record.route_s,
        reserve_ms=1000 * spent.get(Phase.RESERVING, 0.0),
        prefill_ms=1000 * spent.get(Phase.PREFILLING, 0.0),
        transfer_ms=1000 * spent.get(Phase.TRANSFERRING, 0.0),
        decode_ms=1000 * spent.get(Phase.DECODING, 0.0),
        worker_prefill_ms=1000 * (prefill.prefill_s or decode.prefill_s),
        worker_transfer_busy_ms=1000 * prefill.transfer_busy_s,
        worker_transfer_exposed_ms=1000 * prefill.transfer_exposed_s,
        worker_decode_ms=1000 * decode.decode_s,
        prefill_worker=first.prefill_worker,
        decode_worker=first.decode_worker,
        transport=prefill.transport,
        pages_shipped=prefill.pages_shipped,
        bytes_shipped=prefill.bytes_shipped,
        attempts=1 + first.state.losses + first.state.preemptions,
        reason=first.reason,
        finish_reasons=tuple(choice.end.reason for choice in record.choices if choice.end is not None),
    )


def num_output(choice: ChoiceRecord) -> int:
    """Tokens of a choice that count: to its end once that is known, without those of earlier parts of the answer."""
    whole = choice.end.num_output if choice.complete and choice.end is not None else len(choice.state.tokens)
    return whole - len(choice.request.request.delivered)


def _itl_ms(choice: ChoiceRecord) -> float:
    count = len(choice.state.tokens) - len(choice.request.request.delivered)
    if choice.first_token_at is None or choice.last_token_at is None or count < 2:
        return 0.0
    return 1000 * (choice.last_token_at - choice.first_token_at) / (count - 1)


def account(record: RequestRecord, report: RequestReport, metrics: RouterMetrics, error: TwostrokeError | None) -> None:
    """Write the log line and count the request. Called once for each accepted request, at its end."""
    reason = error.code if error is not None else record.choices[0].end.reason.value if record.choices[0].end else ""
    outcome = "finished" if error is None else "cancelled" if isinstance(error, Cancelled) else "failed"
    metrics.requests.of(outcome, reason).inc()
    metrics.prompt_tokens.inc(report.prompt_tokens)
    metrics.cached_prompt_tokens.inc(report.cached_tokens)
    metrics.e2e_request_latency_seconds.observe(report.duration_ms / 1000)
    metrics.request_queue_time_seconds.observe(report.queue_ms / 1000)
    if report.ttft_ms:
        metrics.time_to_first_token_seconds.observe(report.ttft_ms / 1000)
        metrics.request_prefill_time_seconds.observe((report.reserve_ms + report.prefill_ms) / 1000)
    if error is None:
        metrics.request_success.of(reason).inc()
        metrics.request_decode_time_seconds.observe(report.decode_ms / 1000)
        if report.prefill_worker and report.decode_worker:
            metrics.kv_transfer_time_seconds.observe(report.transfer_ms / 1000)
    request = record.request
    seconds = report.duration_ms / 1000
    log_request(
        log,
        request_id=request.request_id,
        outcome="finished" if error is None else error.code,
        client_request_id=request.client_request_id,
        facts={
            "tenant": request.tenant,
            "model": request.model,
            **({"template": request.template} if request.template else {}),
            **({"delivered_tokens": len(request.delivered)} if request.delivered else {}),
            "prompt_tokens": report.prompt_tokens,
            "cached_tokens": report.cached_tokens,
            "tokens_out": report.completion_tokens,
            "ttft_ms": round(report.ttft_ms, 3),
            "itl_ms": round(report.itl_ms, 3),
            "tps": round(report.completion_tokens / seconds, 3) if seconds > 0 else 0.0,
            "queue_wait_ms": round(report.queue_ms, 3),
            "prefill_ms": round(report.prefill_ms, 3),
            "transfer_ms": round(report.transfer_ms, 3),
            "duration_ms": round(report.duration_ms, 3),
            "finish_reason": reason,
            "prefill_worker": report.prefill_worker,
            "decode_worker": report.decode_worker,
            "attempts": report.attempts,
        },
    )
