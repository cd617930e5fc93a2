"""The table of metrics. Adding one is adding a row here.

Where a metric means what vLLM's of the same name means, it has that name with `rayk_` for `vllm:`
(docs.vllm.ai, "Production Metrics"; Ray's own Serve LLM dashboard reads them as `ray_vllm_...`). Through Ray
every name has the prefix `ray_`; rows of an HTTP front (`rayk_front_...`) stand on its own /metrics.

Ray tells histograms by their buckets: counts are exact, a histogram's `_sum` is not (it adds up the middles
of buckets). What is to be exact has a counter of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SHORT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_COUNTS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
_BYTES = tuple(float(1 << n) for n in range(12, 36, 3))

RANK_LABELS = ("model", "engine", "role", "rank")
"""What every value of an engine's rank is labelled with; its sink knows them."""
DEPLOYMENT_LABELS = ("model",)
"""Of values that belong to requests, wherever they ran."""

LABEL_VALUES: dict[str, frozenset[str]] = {
    "role": frozenset({"aggregated", "prefill", "decode"}),
    "phase": frozenset({"prefill", "decode", "mixed"}),
    "mode": frozenset({"pull", "push"}),
    "state": frozenset({"free", "cached", "used", "leased"}),
    "finish_reason": frozenset({"stop", "length", "abort", "error", "handed_over"}),
    "reason": frozenset({"TRANSFER_ERROR", "KV_MISMATCH", "TIMEOUT", "UNSUPPORTED", "ENGINE_ERROR"}),
    "verdict": frozenset(
        {
            "PASS",
            "NEAR_TIE",
            "TOKEN_MISMATCH",
            "KV_MISMATCH",
            "TRANSFER_ERROR",
            "ENGINE_ERROR",
            "TIMEOUT",
            "UNSUPPORTED",
        }
    ),
}
"""All values of labels that name one of a fixed set. The others (`model`, `engine`, `rank`, `group`, `kind`,
`point`, and `path` and `status` of a front) have as many as a deployment has of them, whatever its requests
are."""


@enum.unique
class MetricKind(enum.StrEnum):
    """How values add up."""

    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. `labels` are the names every value is labelled with, those the sink knows first."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = RANK_LABELS
    buckets: tuple[float, ...] = ()
    """Upper borders, for histograms."""


def _counter(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    labels = (*RANK_LABELS, *labels)
    return Metric(name=name, kind=MetricKind.COUNTER, unit=unit, help=help_text, labels=labels)


def _gauge(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, unit=unit, help=help_text, labels=(*RANK_LABELS, *labels))


def _histogram(
    name: str, unit: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = RANK_LABELS
) -> Metric:
    return Metric(
        name=name, kind=MetricKind.HISTOGRAM, unit=unit, help=help_text, labels=labels, buckets=buckets
    )


def _latency(name: str, help_text: str, buckets: tuple[float, ...] = _SECONDS) -> Metric:
    return _histogram(name, "s", help_text, buckets, DEPLOYMENT_LABELS)


def _of(kind: MetricKind, name: str, unit: str, help_text: str, *labels: str) -> Metric:
    """Of no engine: all labels are given."""
    buckets = _SECONDS if kind is MetricKind.HISTOGRAM else ()
    return Metric(name=name, kind=kind, unit=unit, help=help_text, labels=labels, buckets=buckets)


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_ENGINE = (
    _gauge("rayk_num_requests_running", "requests", "Requests in the running batch"),
    _gauge("rayk_num_requests_waiting", "requests", "Requests waiting to be scheduled"),
    _gauge("rayk_num_requests_receiving", "requests", "Requests whose KV is awaited from another engine"),
    _counter("rayk_requests_total", "requests", "Requests that ended at this engine", "finish_reason"),
    _counter("rayk_prompt_tokens_total", "tokens", "Prompt tokens computed, recomputed ones included"),
    _counter("rayk_generation_tokens_total", "tokens", "Tokens sampled"),
    _counter("rayk_num_preemptions_total", "requests", "Requests preempted for want of blocks"),
    _counter("rayk_prefix_cache_queries_total", "tokens", "Prompt tokens looked for in the prefix cache"),
    _counter("rayk_prefix_cache_hits_total", "tokens", "Of these, found"),
    _gauge("rayk_kv_cache_usage_perc", "1", "Share of the KV pool that is taken, 0 to 1"),
    _gauge("rayk_kv_pool_blocks", "blocks", "KV blocks of the pool, the null block aside"),
    _gauge(
        "rayk_kv_blocks",
        "blocks",
        "KV blocks by group and state; group 'pool' counts each once: free, cached (free to take, still to "
        "be found), used, leased (held for another engine)",
        "group",
        "state",
    ),
    _counter("rayk_turns_total", "turns", "Turns of the engine's loop: it stands still where they do"),
    _counter("rayk_steps_total", "steps", "Steps of the model, by phase", "phase"),
    _counter("rayk_step_busy_seconds_total", "s", "Time in turns that had a step, by phase", "phase"),
    _counter("rayk_model_seconds_total", "s", "Of these, the model's forward pass", "phase"),
    _histogram(
        "rayk_step_seconds",
        "s",
        "A turn with a step, of at most 100 a second",
        _SHORT,
        (*RANK_LABELS, "phase"),
    ),
    _histogram("rayk_iteration_tokens", "tokens", "Tokens of a step, of at most 100 a second", _COUNTS),
    _histogram("rayk_batch_requests", "requests", "Requests of a step, of at most 100 a second", _COUNTS),
    _counter(
        "rayk_collective_seconds_total",
        "s",
        "This rank's time in collectives: the rank that waits least is the one that others wait for. The "
        "spread over an engine's ranks is its skew. Not counted for collectives on a GPU's stream",
    ),
    _counter("rayk_estimated_flops_per_gpu_total", "FLOP", "Floating point operations of the model's steps"),
    _counter(
        "rayk_estimated_read_bytes_per_gpu_total", "bytes", "Weights and KV that the model's steps read"
    ),
    _gauge("rayk_model_flops_per_second", "FLOP/s", "Achieved while the model ran, in the last second"),
    _gauge("rayk_model_bytes_per_second", "bytes/s", "Achieved while the model ran, in the last second"),
    _gauge("rayk_model_flops_utilization", "1", "Of the device's peak; absent where that is not known"),
    _gauge("rayk_model_bandwidth_utilization", "1", "Of the device's peak; absent where that is not known"),
)

_TRANSFERS = (
    _histogram("rayk_nixl_xfer_time_seconds", "s", "A request's KV, first post to last completion", _SHORT),
    _histogram("rayk_nixl_post_time_seconds", "s", "Posting a request's reads or writes", _SHORT),
    _histogram("rayk_nixl_bytes_transferred", "bytes", "KV bytes of a request, to one rank", _BYTES),
    _histogram("rayk_nixl_num_descriptors", "descriptors", "Descriptors of a request, to one rank", _COUNTS),
    _counter("rayk_nixl_transfers_total", "transfers", "Requests whose KV came to this rank", "mode"),
    _counter("rayk_nixl_bytes_total", "bytes", "KV bytes that came to this rank", "mode"),
    _counter("rayk_nixl_descriptors_total", "descriptors", "Descriptors of these", "mode"),
    _counter("rayk_nixl_post_seconds_total", "s", "Time posting these", "mode"),
    _counter("rayk_nixl_wait_seconds_total", "s", "Time waiting for these, after posting", "mode"),
    _counter("rayk_nixl_staged_total", "transfers", "Of these, through a staging buffer", "mode"),
    _counter("rayk_nixl_num_failed_transfers_total", "transfers", "Transfers that failed here", "reason"),
    _counter("rayk_nixl_num_failed_notifications_total", "notifications", "Messages nobody could take"),
    _counter("rayk_nixl_num_kv_expired_reqs_total", "requests", "Leases that ended without a release"),
    _counter("rayk_kv_digest_checks_total", "requests", "Requests whose digests this rank compared"),
    _counter("rayk_kv_mismatches_total", "requests", "Of these, those whose digests differed"),
    _counter("rayk_kv_mismatched_words_total", "digests", "Digest words that differed"),
    _counter("rayk_kv_bytes_checked_total", "bytes", "KV bytes whose digests were compared"),
    _counter("rayk_faults_total", "faults", "Planted faults that struck here", "kind", "point"),
)

_REQUESTS = (
    _latency("rayk_ttft_seconds", "Arrival to first token (vllm:time_to_first_token_seconds)"),
    _latency("rayk_tpot_seconds", "Mean time per output token after the first, of a request", _SHORT),
    _latency("rayk_itl_seconds", "Each gap between tokens (vllm:inter_token_latency_seconds)", _SHORT),
    _latency("rayk_e2e_seconds", "Arrival to last token (vllm:e2e_request_latency_seconds)"),
    _latency("rayk_request_queue_time_seconds", "Arrival until an engine was asked"),
    _latency("rayk_request_prefill_time_seconds", "Then, until the first token"),
    _latency("rayk_request_decode_time_seconds", "From when it could decode until the last token"),
)

_RUN = (
    _of(_GAUGE, "rayk_cells_planned", "cells", "Cells of the experiment that runs"),
    _of(_GAUGE, "rayk_cells_done", "cells", "Of these, those that have ended, earlier runs' included"),
    _of(_COUNTER, "rayk_cells_total", "cells", "Cells that ended in this run", "verdict"),
    _of(_COUNTER, "rayk_engines_lost_total", "engines", "Engines that died or hung", "engine", "role"),
)

_FRONT = (
    _of(
        _COUNTER,
        "rayk_front_requests_total",
        "requests",
        "HTTP requests answered; status 499: the client went before",
        "path",
        "status",
    ),
    _of(_GAUGE, "rayk_front_running_requests", "requests", "HTTP requests under way"),
    _of(_COUNTER, "rayk_front_prompt_tokens_total", "tokens", "Prompt tokens of ended calls"),
    _of(_COUNTER, "rayk_front_cached_tokens_total", "tokens", "Of these, from prefix caches"),
    _of(_COUNTER, "rayk_front_output_tokens_total", "tokens", "Output tokens of ended calls"),
    _of(_HISTOGRAM, "rayk_front_ttft_seconds", "s", "HTTP call to its first token"),
    _of(_HISTOGRAM, "rayk_front_e2e_seconds", "s", "HTTP call to its last token"),
    _of(
        _GAUGE,
        "rayk_front_engine_ready",
        "engines",
        "1 where an engine serves, 0 where it does not",
        "engine",
        "role",
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*_ENGINE, *_TRANSFERS, *_REQUESTS, *_RUN, *_FRONT)
}
"""Every metric by name."""
