"""Every metric of every role, declared here and nowhere else.

Names are `twostroke_` and the suffix, labels and buckets that vLLM uses, so that dashboards and autoscalers
need only another prefix. `model_name` and `engine` (a worker's id, or `router`) are on all of them. Counters get
`_total` on the wire. Label values are members of small fixed sets, never ids or anything a client sent.

    RouterMetrics   a request's life as the router sees it: outcomes, latencies by phase, refusals, continuations
    WorkerMetrics   a worker's load, page ledger, and what it computed and moved

The registry is passed in, so that several components, or tests, in one process do not collide.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from twostroke.cluster.core.messages import Ended, LoadReport

PREFIX = "twostroke_"
COMMON_LABELS = ("model_name", "engine")

# fmt: off
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
OVERHEAD_BUCKETS = (.00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1)
# fmt: on

M = TypeVar("M", bound=MetricWrapperBase)


class Family(Generic[M]):
    """A metric whose common labels are bound; `of` binds its own. Children are kept: to look one up in the metric takes
    7 us, and a request needs ten.
    """

    def __init__(self, metric: M, common: tuple[str, ...]) -> None:
        self._metric = metric
        self._common = common
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """The child with these values of the metric's own labels, in order of declaration."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*self._common, *values)
        return child


class _Declarer:
    """Declares metrics with the common labels and binds those."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        self._registry = registry
        self._common = (model_name, engine)

    def counters(self, name: str, help_text: str, *labels: str) -> Family[Counter]:
        metric = Counter(PREFIX + name, help_text, COMMON_LABELS + labels, registry=self._registry)
        return Family(metric, self._common)

    def gauges(self, name: str, help_text: str, *labels: str) -> Family[Gauge]:
        metric = Gauge(PREFIX + name, help_text, COMMON_LABELS + labels, registry=self._registry)
        return Family(metric, self._common)

    def histograms(self, name: str, help_text: str, buckets: Sequence[float], *labels: str) -> Family[Histogram]:
        metric = Histogram(
            PREFIX + name, help_text, COMMON_LABELS + labels, registry=self._registry, buckets=tuple(buckets)
        )
        return Family(metric, self._common)

    def counter(self, name: str, help_text: str) -> Counter:
        return self.counters(name, help_text).of()

    def gauge(self, name: str, help_text: str) -> Gauge:
        return self.gauges(name, help_text).of()

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return self.histograms(name, help_text, buckets).of()


class RouterMetrics:
    """What the router measures. `accepted` equals the sum of `requests` once nothing runs (FIELD-REPORTS E32)."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str = "router") -> None:
        declare = _Declarer(registry, model_name, engine)
        self.accepted = declare.counter("requests_accepted", "Requests that the dispatcher took on.")
        self.requests = declare.counters(
            "requests", "Accepted requests that ended, by outcome and reason.", "outcome", "reason"
        )
        """outcome: finished, cancelled or failed; reason: the finish reason of choice 0, or the error's code."""
        self.request_success = declare.counters("request_success", "Finished requests.", "finished_reason")
        self.refusals = declare.counters("refusals", "Requests refused, by reason (an error code).", "reason")
        """Over HTTP and gRPC; `internal` also counts bugs met while an accepted one was answered."""
        self.http_responses = declare.counters("http_responses", "HTTP answers.", "endpoint", "status")
        self.num_requests_running = declare.gauge("num_requests_running", "Requests placed on workers.")
        self.num_requests_waiting = declare.gauge("num_requests_waiting", "Requests admitted and not yet placed.")
        self.time_to_first_token_seconds = declare.histogram(
            "time_to_first_token_seconds", "Arrival to first token at the router.", TTFT_BUCKETS
        )
        self.inter_token_latency_seconds = declare.histogram(
            "inter_token_latency_seconds", "Time between tokens of one choice.", ITL_BUCKETS
        )
        self.e2e_request_latency_seconds = declare.histogram(
            "e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS
        )
        self.request_queue_time_seconds = declare.histogram(
            "request_queue_time_seconds", "Admission to placement.", LATENCY_BUCKETS
        )
        self.request_prefill_time_seconds = declare.histogram(
            "request_prefill_time_seconds", "Placement to first token.", LATENCY_BUCKETS
        )
        self.request_decode_time_seconds = declare.histogram(
            "request_decode_time_seconds", "First token to end.", LATENCY_BUCKETS
        )
        self.kv_transfer_time_seconds = declare.histogram(
            "kv_transfer_time_seconds",
            "First token to verified hand-over: the part compute did not hide.",
            TTFT_BUCKETS,
        )
        self.prompt_tokens = declare.counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = declare.counter("generation_tokens", "Output tokens delivered.")
        self.cached_prompt_tokens = declare.counter("cached_prompt_tokens", "Prompt tokens served from a prefix cache.")
        self.continuations = declare.counters(
            "continuations", "Attempts after the first, by what ended the one before.", "cause"
        )
        self.dropped_messages = declare.counters(
            "dropped_messages", "Worker messages about unknown or older attempts, and duplicates.", "reason"
        )
        self.placements = declare.counters("placements", "Placement decisions, by reason.", "reason")
        self.router_overhead_seconds = declare.histograms(
            "router_overhead_seconds", "Time the router itself spends on a request.", OVERHEAD_BUCKETS, "stage"
        )
        """stage: parse, tokenize or choose."""
        self.workers = declare.gauges("workers", "Attached workers.", "role")


class WorkerMetrics:
    """What a worker measures, fed from the messages that it sends anyway."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        declare = _Declarer(registry, model_name, engine)
        self.num_requests_running = declare.gauge("num_requests_running", "Jobs that take part in steps.")
        self.num_requests_waiting = declare.gauge("num_requests_waiting", "Accepted jobs that do not yet.")
        self.leases = declare.gauge("leases", "Open leases.")
        self.kv_cache_usage_perc = declare.gauge("kv_cache_usage_perc", "Share of pages in use; 1 means all of them.")
        self.pages = declare.gauges("kv_pages", "Page ledger: each page is in exactly one state.", "state")
        self.queued_tokens = declare.gauge("queued_prefill_tokens", "Prompt tokens accepted and not yet computed.")
        self.prompt_tokens = declare.counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = declare.counter("generation_tokens", "Output tokens sampled.")
        self.prefix_cache_queries = declare.counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_cache_hits = declare.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.num_preemptions = declare.counter("num_preemptions", "Jobs preempted for lack of pages.")
        self.jobs = declare.counters("jobs", "Jobs ended, by outcome.", "outcome")
        self.refusals = declare.counters("refusals", "Submits refused, by reason.", "reason")
        self.pages_moved = declare.counters("kv_pages_moved", "KV pages shipped or received.", "transport", "direction")
        self.bytes_moved = declare.counters("kv_bytes_moved", "KV bytes shipped or received.", "transport", "direction")
        """direction: sent or received."""
        self.transfer_failures = declare.counters("kv_transfer_failures", "Transfers that did not end well.", "reason")
        self.dropped_messages = declare.counters("dropped_messages", "Messages about unknown jobs.", "reason")
        self.kv_transfer_time_seconds = declare.histogram(
            "kv_transfer_time_seconds", "Time in which one job's pages were being sent.", TTFT_BUCKETS
        )
        self.request_queue_time_seconds = declare.histogram(
            "request_queue_time_seconds", "Accepted to first step.", LATENCY_BUCKETS
        )
        self.request_prefill_time_seconds = declare.histogram(
            "request_prefill_time_seconds", "First chunk launched to first token.", LATENCY_BUCKETS
        )
        self.request_decode_time_seconds = declare.histogram(
            "request_decode_time_seconds", "Time in decode steps.", LATENCY_BUCKETS
        )
        self._generated = 0

    def on_load(self, report: LoadReport) -> None:
        """Take over one load report; call with each, in order, of one engine's life."""
        ledger = report.ledger
        self.num_requests_running.set(report.running)
        self.num_requests_waiting.set(report.waiting)
        self.leases.set(report.leases)
        self.queued_tokens.set(report.queued_tokens)
        for state in ("free", "cached", "active", "leased", "quarantined"):
            self.pages.of(state).set(getattr(ledger, state))
        used = ledger.active + ledger.leased + ledger.quarantined
        self.kv_cache_usage_perc.set(used / ledger.total if ledger.total else 0.0)
        self.generation_tokens.inc(report.generated_tokens - self._generated)
        self._generated = report.generated_tokens

    def on_ended(self, ended: Ended) -> None:
        """Count one ended job; call exactly once for each."""
        timings = ended.timings
        self.jobs.of(ended.outcome.value).inc()
        self.prompt_tokens.inc(timings.computed_tokens)
        self.prefix_cache_queries.inc(timings.computed_tokens + timings.cached_tokens)
        self.prefix_cache_hits.inc(timings.cached_tokens)
        self.num_preemptions.inc(timings.preemptions)
        self.request_queue_time_seconds.observe(timings.queue_s)
        if timings.prefill_s:
            self.request_prefill_time_seconds.observe(timings.prefill_s)
        if timings.decode_s:
            self.request_decode_time_seconds.observe(timings.decode_s)
        if timings.pages_shipped:
            self.pages_moved.of(timings.transport, "sent").inc(timings.pages_shipped)
            self.bytes_moved.of(timings.transport, "sent").inc(timings.bytes_shipped)
            self.kv_transfer_time_seconds.observe(timings.transfer_busy_s)


def new_registry() -> CollectorRegistry:
    """A registry of one process, with the process's own memory, CPU and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format, UTF-8."""
    return generate_latest(registry)
