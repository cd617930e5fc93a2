"""The table of metrics. Adding one is adding a row here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@enum.unique
class MetricKind(enum.StrEnum):
    """How values add up."""

    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. `labels` are the names every value must be labelled with."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ("engine",)
    buckets: tuple[float, ...] = ()
    """Upper borders, for histograms."""


def _counter(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    labels = ("engine", *labels)
    return Metric(name=name, kind=MetricKind.COUNTER, unit=unit, help=help_text, labels=labels)


def _gauge(name: str, unit: str, help_text: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, unit=unit, help=help_text)


def _seconds(name: str, help_text: str) -> Metric:
    return Metric(name=name, kind=MetricKind.HISTOGRAM, unit="s", help=help_text, buckets=_SECONDS)


def _front(name: str, kind: MetricKind, unit: str, help_text: str, *labels: str) -> Metric:
    """Of an HTTP front, which no engine labels."""
    buckets = _SECONDS if kind is MetricKind.HISTOGRAM else ()
    return Metric(name=name, kind=kind, unit=unit, help=help_text, labels=labels, buckets=buckets)


_ALL = (
    _counter("rayk_requests_total", "requests", "Requests finished, by reason", "finish_reason"),
    _counter("rayk_prompt_tokens_total", "tokens", "Prompt tokens computed"),
    _counter("rayk_output_tokens_total", "tokens", "Tokens sampled"),
    _counter("rayk_preemptions_total", "requests", "Requests preempted for want of blocks"),
    _counter("rayk_steps_total", "steps", "Steps of the model run"),
    _counter("rayk_transfer_bytes_total", "bytes", "KV bytes read from producers"),
    _counter("rayk_transfer_descriptors_total", "descriptors", "Descriptors posted"),
    _counter("rayk_transfer_failures_total", "transfers", "Transfers that failed, by verdict", "verdict"),
    _counter("rayk_kv_bytes_checked_total", "bytes", "KV bytes whose digests were compared"),
    _counter("rayk_kv_mismatches_total", "requests", "Requests whose KV digests differed"),
    _gauge("rayk_running_requests", "requests", "Requests in the running batch"),
    _gauge("rayk_waiting_requests", "requests", "Requests waiting to be scheduled"),
    _gauge("rayk_free_blocks", "blocks", "KV blocks free to allocate"),
    _gauge("rayk_leased_blocks", "blocks", "KV blocks held for a consumer"),
    _seconds("rayk_step_seconds", "One step of the engine's loop"),
    _seconds("rayk_ttft_seconds", "Arrival to first token"),
    _seconds("rayk_tpot_seconds", "Mean time per output token after the first"),
    _seconds("rayk_e2e_seconds", "Arrival to last token"),
    _seconds("rayk_transfer_seconds", "A request's KV transfer, first post to last completion"),
    _front(
        "rayk_front_requests_total",
        MetricKind.COUNTER,
        "requests",
        "HTTP requests answered; status 499: the client went before",
        "path",
        "status",
    ),
    _front("rayk_front_running_requests", MetricKind.GAUGE, "requests", "HTTP requests under way"),
    _front("rayk_front_prompt_tokens_total", MetricKind.COUNTER, "tokens", "Prompt tokens of ended calls"),
    _front("rayk_front_cached_tokens_total", MetricKind.COUNTER, "tokens", "Of these, from prefix caches"),
    _front("rayk_front_output_tokens_total", MetricKind.COUNTER, "tokens", "Output tokens of ended calls"),
    _front("rayk_front_ttft_seconds", MetricKind.HISTOGRAM, "s", "HTTP call to its first token"),
    _front("rayk_front_e2e_seconds", MetricKind.HISTOGRAM, "s", "HTTP call to its last token"),
    _front(
        "rayk_front_engine_ready",
        MetricKind.GAUGE,
        "engines",
        "1 where an engine serves, 0 where it does not",
        "engine",
        "role",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
"""Every metric by name."""
