from prometheus_client.parser import text_string_to_metric_families

from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.messages import Ended, JobTimings, Ledger, LoadReport, Outcome
from twostroke.cluster.telemetry.metrics import RouterMetrics, WorkerMetrics, exposition, new_registry


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def load_report(generated_tokens: int) -> LoadReport:
    return LoadReport(
        ledger=Ledger(free=6, cached=1, active=2, leased=1, quarantined=0),
        running=2,
        waiting=1,
        leases=1,
        queued_tokens=40,
        step_age_s=0.0,
        num_steps=3,
        event_sequence=0,
        draining=False,
        generated_tokens=generated_tokens,
    )


def test_worker_metrics_follow_load_reports_and_ended_jobs() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry, "m", "decode-0")
    metrics.on_load(load_report(5))
    metrics.on_load(load_report(9))
    timings = JobTimings(computed_tokens=3, cached_tokens=4, pages_shipped=2, bytes_shipped=64, transport="grpc")
    metrics.on_ended(Ended(JobId(RequestId("r"), 0, 0), Outcome.HANDED_OVER, timings=timings))

    got = samples(exposition(registry))
    common = {("model_name", "m"), ("engine", "decode-0")}
    assert got["twostroke_generation_tokens_total", frozenset(common)] == 9
    assert got["twostroke_kv_cache_usage_perc", frozenset(common)] == 0.3
    assert got["twostroke_kv_pages", frozenset(common | {("state", "free")})] == 6
    assert got["twostroke_prefix_cache_queries_total", frozenset(common)] == 7
    sent = frozenset(common | {("transport", "grpc"), ("direction", "sent")})
    assert got["twostroke_kv_bytes_moved_total", sent] == 64


def test_two_components_of_one_process_use_registries_of_their_own() -> None:
    first, second = new_registry(), new_registry()
    RouterMetrics(first, "m").accepted.inc()
    RouterMetrics(second, "m")
    key = ("twostroke_requests_accepted_total", frozenset({("model_name", "m"), ("engine", "router")}))
    assert samples(exposition(first))[key] == 1
    assert samples(exposition(second))[key] == 0
