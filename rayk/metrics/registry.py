"""The table of metrics. Adding one is adding a row here.

Where a metric means what vLLM's of the same name means, it has that name with `rayk_` for `vllm:`
(docs.vllm.ai, "Production Metrics"; Ray's own Serve LLM dashboard reads them as `ray_vllm_...`). Through Ray
every name has the prefix `ray_`; rows of an HTTP front (`rayk_front_...`) stand on its own /metrics.

Ray tells histograms by their buckets: counts are exact, a histogram's `_sum` is not (it adds up the middles
of buckets). What is to be exact has a counter of its own.

Ray's histograms take a call for every value, which is too much for tokens and steps. Those are folded into
counts where they are made, and told as counters: `NAME_bucket_total` by `le`, `NAME_count_total` and
`NAME_sum_total`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rayk.types.bounds import MAX_DRAFTS
from rayk.types.verdicts import VERDICTS

_TENTHS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.3, 0.5, 0.75, 0.8)
_WHOLE = (1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 120.0)
_SECONDS = (0.001, 0.0025, 0.005, 0.0075, *_TENTHS, *_WHOLE)
"""Seconds of requests: vLLM's borders of TTFT and E2E as far as anybody waits, and some below for small
models."""
_GAPS = (0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075)
# of tokens: vLLM's borders, and a decade below them
_ITL = (*_GAPS, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_SHORT = (0.0001, 0.00025, 0.0005, *_GAPS, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # for steps and transfers
_COUNTS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)
_BYTES = tuple(float(1 << n) for n in range(12, 36, 3))

RANK_LABELS = ("model", "engine", "role", "rank")  # for an engine's rank; its meter knows them
ENGINE_LABELS = ("model", "engine", "role")  # for a whole engine, reported by whoever looks after it
TIER_LABELS = ("model", "engine")  # for a host tier's process; `engine` is its name
DEPLOYMENT_LABELS = ("model",)  # for requests, wherever they ran

LABEL_VALUES: dict[str, frozenset[str]] = {
    "role": frozenset({"aggregated", "prefill", "decode"}),
    "phase": frozenset({"prefill", "decode", "mixed"}),
    "mode": frozenset({"pull", "push"}),
    "state": frozenset({"free", "cached", "used", "leased"}),
    "finish_reason": frozenset({"stop", "length", "abort", "error", "handed_over", "refused"}),
    "move": frozenset({"store", "load", "swap"}),
    "outcome": frozenset({"written", "read", "evicted", "dropped", "bad"}),
    "position": frozenset(map(str, range(MAX_DRAFTS))),
    "reason": frozenset(
        {"TRANSFER_ERROR", "KV_MISMATCH", "NOT_FINITE", "TIMEOUT", "UNSUPPORTED", "ENGINE_ERROR"}
    ),
    "verdict": frozenset(VERDICTS),
}
"""Fixed values of labels. The others (`model`, `engine`, `rank`, `stage`, `tp_rank`, `dcp_rank`, `group`,
`kind`, `point`, `run`, `path`, `status`) have as many as a deployment has, whatever its requests."""


@enum.unique
class MetricKind(enum.StrEnum):
    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Describes a metric. `labels` name what every value is labelled with, those the sink knows first."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = RANK_LABELS
    buckets: tuple[float, ...] = ()  # upper borders, for histograms
    is_folded: bool = False  # a histogram of what is observed so often that it goes on as counts
    by_leader: bool = False  # whether rank 0 counts it for its whole engine: no other rank has it

    @property
    def series_ending(self) -> str:
        """What Ray's endpoint has behind `_bucket`, `_count` and `_sum`."""
        return "_total" if self.is_folded else ""


def _counter(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    labels = (*RANK_LABELS, *labels)
    return Metric(name=name, kind=MetricKind.COUNTER, unit=unit, help=help_text, labels=labels)


def _by_leader(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    return replace(_counter(name, unit, help_text, *labels), by_leader=True)


def _gauge(name: str, unit: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, unit=unit, help=help_text, labels=(*RANK_LABELS, *labels))


def _histogram(
    name: str, unit: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = RANK_LABELS
) -> Metric:
    return Metric(
        name=name, kind=MetricKind.HISTOGRAM, unit=unit, help=help_text, labels=labels, buckets=buckets
    )


def _folded(metric: Metric) -> Metric:
    return replace(metric, is_folded=True)


def _latency(name: str, help_text: str, buckets: tuple[float, ...] = _SECONDS) -> Metric:
    return _histogram(name, "s", help_text, buckets, DEPLOYMENT_LABELS)


def _of(kind: MetricKind, name: str, unit: str, help_text: str, *labels: str) -> Metric:
    """Make a metric of no engine: all its labels are given."""
    buckets = _SECONDS if kind is MetricKind.HISTOGRAM else ()
    return Metric(name=name, kind=kind, unit=unit, help=help_text, labels=labels, buckets=buckets)


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_ENGINE = (
    _gauge(
        "rayk_engine_rank_info",
        "1",
        "1 for each rank: its pipeline stage, its rank among the stage's, and its turn where these deal the "
        "tokens of a sequence",
        "stage",
        "tp_rank",
        "dcp_rank",
    ),
    _gauge("rayk_num_requests_running", "requests", "Requests in the running batch"),
    _gauge("rayk_num_requests_waiting", "requests", "Requests waiting to be scheduled"),
    _gauge("rayk_num_requests_receiving", "requests", "Requests whose KV is awaited from another engine"),
    _counter("rayk_requests_total", "requests", "Requests that ended at this engine", "finish_reason"),
    _by_leader(
        "rayk_not_finite_requests_total",
        "requests",
        "Requests that ended with an error since their logits or KV were NaN or infinite",
    ),
    _counter("rayk_prompt_tokens_total", "tokens", "Prompt tokens computed, recomputed ones included"),
    _counter("rayk_generation_tokens_total", "tokens", "Tokens sampled"),
    _by_leader(
        "rayk_spec_decode_num_drafts_total",
        "drafts",
        "Steps of a request that computed proposed tokens, too; absent where engines draft nothing, like the "
        "next three",
    ),
    _by_leader("rayk_spec_decode_num_draft_tokens_total", "tokens", "Tokens that were proposed"),
    _by_leader(
        "rayk_spec_decode_num_accepted_tokens_total", "tokens", "Of these, those that the model agreed to"
    ),
    _by_leader(
        "rayk_spec_decode_num_accepted_tokens_per_pos_total",
        "tokens",
        "The same by position in the draft, from 0",
        "position",
    ),
    _by_leader(
        "rayk_spec_decode_num_undrafted_requests_total",
        "requests",
        "Requests that nothing is proposed for, since the drafter lacks KV of their first tokens; absent, "
        "like the next one, where no drafter keeps any",
    ),
    _by_leader(
        "rayk_spec_decode_num_undrafted_tokens_total",
        "tokens",
        "Tokens of cached prefixes that were computed once more for a drafter that lacked their KV",
    ),
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
    _folded(_histogram("rayk_step_seconds", "s", "Each turn with a step", _SHORT, (*RANK_LABELS, "phase"))),
    _folded(_histogram("rayk_iteration_tokens", "tokens", "Tokens of each step", _COUNTS)),
    _folded(_histogram("rayk_batch_requests", "requests", "Requests of each step", _COUNTS)),
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
    _gauge(
        "rayk_model_flops_utilization",
        "1",
        "Of the device's dense peak in the model's dtype; absent where that is not known",
    ),
    _gauge("rayk_model_bandwidth_utilization", "1", "Of the device's peak; absent where that is not known"),
    _gauge(
        "rayk_pace_late_share",
        "1",
        "How late steps of a paced engine began or ended, of their length: the 99th percentile of its last "
        "65,536; absent where engines compute",
    ),
    _gauge(
        "rayk_pace_machine_busy_share",
        "1",
        "How busy all cores of a paced engine's node were while it stepped, whoever used them; absent where "
        "engines compute",
    ),
    _by_leader(
        "rayk_pace_outside_steps_total",
        "steps",
        "Steps of a paced engine unlike those that its cost tables were fitted to; absent where engines "
        "compute",
    ),
)

# Every rank tells of what came to it, or was held by it: the sum over ranks is parts of requests, and a rank
# that saw no error counts none. What means requests is counted where all ranks' news meet: at rank 0.
_TRANSFERS = (
    _by_leader(
        "rayk_nixl_received_requests_total", "requests", "Requests whose KV came to every rank, and was right"
    ),
    _by_leader(
        "rayk_nixl_failed_requests_total",
        "requests",
        "Requests whose transfer was begun and failed, at whichever ranks; KV_MISMATCH: KV that differed "
        "from its producer's at any of them",
        "reason",
    ),
    _by_leader(
        "rayk_nixl_expired_requests_total",
        "requests",
        "Requests whose lease ended here without a release, at whichever ranks",
    ),
    _histogram("rayk_nixl_xfer_time_seconds", "s", "A request's KV, first post to last completion", _SHORT),
    _histogram("rayk_nixl_post_time_seconds", "s", "Posting a request's reads or writes", _SHORT),
    _histogram("rayk_nixl_bytes_transferred", "bytes", "KV bytes of a request, to one rank", _BYTES),
    _histogram("rayk_nixl_num_descriptors", "descriptors", "Descriptors of a request, to one rank", _COUNTS),
    _counter("rayk_nixl_transfers_total", "transfers", "Times that a request's KV came to this rank", "mode"),
    _counter("rayk_nixl_bytes_total", "bytes", "KV bytes that came to this rank", "mode"),
    _counter(
        "rayk_nixl_descriptors_total",
        "descriptors",
        "Descriptors of these, before neighbouring blocks are merged",
        "mode",
    ),
    _counter(
        "rayk_nixl_descriptors_posted_total",
        "descriptors",
        "Descriptors that were posted for these: what was left when neighbouring blocks went as one",
        "mode",
    ),
    _counter("rayk_nixl_post_seconds_total", "s", "Time posting these", "mode"),
    _counter("rayk_nixl_wait_seconds_total", "s", "Time waiting for these, after posting", "mode"),
    _counter("rayk_nixl_staged_total", "transfers", "Of these, through a staging buffer", "mode"),
    _counter("rayk_nixl_num_failed_transfers_total", "transfers", "Transfers that failed here", "reason"),
    _counter("rayk_nixl_num_failed_notifications_total", "notifications", "Messages nobody could take"),
    _counter(
        "rayk_nixl_num_kv_expired_reqs_total",
        "leases",
        "Leases of this rank's blocks that ended without a release: a request has one at every rank",
    ),
    _counter(
        "rayk_kv_digest_checks_total", "checks", "Times that this rank compared the digests of a request's KV"
    ),
    _counter("rayk_kv_mismatches_total", "checks", "Of these, those that differed"),
    _counter("rayk_kv_mismatched_words_total", "digests", "Digest words that differed"),
    _counter("rayk_kv_bytes_checked_total", "bytes", "KV bytes whose digests were compared"),
    _counter("rayk_faults_total", "faults", "Planted faults that struck here", "kind", "point"),
)

# Of engines with a host tier: told by rank 0, but for what the tier itself tells.
_OFFLOAD = (
    _gauge("rayk_offload_tier_up", "tiers", "1 while an engine has a host tier, 0 while it goes on without"),
    _by_leader("rayk_offload_tier_losses_total", "tiers", "Times that an engine's host tier was lost"),
    _by_leader(
        "rayk_offload_stored_bytes_total", "bytes", "KV that the host tier took, swapped out included"
    ),
    _by_leader("rayk_offload_loaded_bytes_total", "bytes", "KV of prompts that came from the host tier"),
    _by_leader(
        "rayk_offload_loaded_tokens_total", "tokens", "Prompt tokens that need not be computed for it"
    ),
    _by_leader("rayk_offload_swapped_out_bytes_total", "bytes", "KV of preempted requests that left"),
    _by_leader("rayk_offload_swapped_in_bytes_total", "bytes", "KV of preempted requests that came back"),
    _by_leader("rayk_offload_lookups_total", "requests", "Prompts that the host tier was asked about"),
    _by_leader("rayk_offload_loads_total", "requests", "Of these, those of which it had something that came"),
    _by_leader("rayk_offload_swaps_total", "requests", "Preempted requests that were swapped out"),
    _by_leader(
        "rayk_offload_failures_total",
        "requests",
        "Moves to or from the host tier that failed: what was to be loaded or to come back is computed",
        "move",
    ),
    _of(
        _GAUGE,
        "rayk_offload_tier_blocks",
        "blocks",
        "Blocks of a host tier by state: free, cached (found by their tokens, the oldest go first), used (on "
        "their way in or out, or swapped out)",
        *TIER_LABELS,
        "state",
    ),
    _of(_COUNTER, "rayk_offload_tier_hits_total", "requests", "Lookups with something there", *TIER_LABELS),
    _of(_COUNTER, "rayk_offload_tier_misses_total", "requests", "Lookups with nothing more", *TIER_LABELS),
    _of(
        _GAUGE,
        "rayk_offload_disk_up",
        "tiers",
        "1 while pages are written to disk, 0 where it is full, read-only or has failed",
        *TIER_LABELS,
    ),
    _of(_GAUGE, "rayk_offload_disk_bytes", "bytes", "What page files take on disk", *TIER_LABELS),
    _of(
        _COUNTER,
        "rayk_offload_disk_pages_total",
        "pages",
        "Pages on disk by what came of them; dropped: the disk does not keep up, or is off; bad: damaged or "
        "gone when they were asked for, and computed",
        *TIER_LABELS,
        "outcome",
    ),
)

_REQUESTS = (
    _of(
        _COUNTER,
        "rayk_request_outcomes_total",
        "requests",
        "Requests by how they ended for whoever asked, on whichever engines and in however many tries. "
        "error: also where its engine died; refused: it can never run, or too many wait; abort: nobody waits "
        "for it any more",
        *DEPLOYMENT_LABELS,
        "finish_reason",
    ),
    _of(
        _GAUGE,
        "rayk_waiting_room_requests",
        "requests",
        "Requests of a server that wait for a place on its engines",
        *DEPLOYMENT_LABELS,
    ),
    _of(_GAUGE, "rayk_placed_requests", "requests", "Requests of a server that have one", *DEPLOYMENT_LABELS),
    _latency("rayk_ttft_seconds", "Arrival to first token (vllm:time_to_first_token_seconds)"),
    _latency("rayk_tpot_seconds", "Mean time per output token after the first, of a request", _ITL),
    _folded(_latency("rayk_itl_seconds", "Each gap between tokens (vllm:inter_token_latency_seconds)", _ITL)),
    _latency("rayk_e2e_seconds", "Arrival to last token (vllm:e2e_request_latency_seconds)"),
    _latency("rayk_request_queue_time_seconds", "Arrival until an engine was asked"),
    _latency("rayk_request_prefill_time_seconds", "Then, until the first token"),
    _latency("rayk_request_decode_time_seconds", "From when it could decode until the last token"),
)

_RUN = (
    _of(_GAUGE, "rayk_cells_planned", "cells", "Cells of an experiment that runs", "run"),
    _of(_GAUGE, "rayk_cells_done", "cells", "Of these, those that have ended, earlier runs' included", "run"),
    _of(_COUNTER, "rayk_cells_total", "cells", "Cells that ended in this run", "run", "verdict"),
)

_ENGINES = (
    _of(
        _GAUGE,
        "rayk_engine_up",
        "engines",
        "1 while an engine is meant to turn, 0 while it is formed; told by whoever looks after it, so that "
        "it is there also where the engine stands still",
        *ENGINE_LABELS,
    ),
    _of(_COUNTER, "rayk_engines_lost_total", "engines", "Engines that died or hung", *ENGINE_LABELS),
)

_FRONT = (
    _of(
        _COUNTER,
        "rayk_front_requests_total",
        "requests",
        "HTTP requests by how they ended; status 499: the client went before its answer began; a stream "
        "that ended with an error has the status of that, not the 200 that it began with",
        "path",
        "status",
    ),
    _of(
        _GAUGE,
        "rayk_front_running_requests",
        "requests",
        "HTTP requests under way, those to /metrics and /health aside",
    ),
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
    metric.name: metric
    for metric in (*_ENGINE, *_TRANSFERS, *_OFFLOAD, *_REQUESTS, *_RUN, *_ENGINES, *_FRONT)
}


def beginnings(prefixes: tuple[str, ...], *, is_leader: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what stands at 0 when a rank starts: counters with these prefixes, by all fixed values of their
    labels."""
    for name, metric in METRICS.items():
        own = metric.labels[len(RANK_LABELS) :]
        is_ours = metric.kind is MetricKind.COUNTER and metric.labels[: len(RANK_LABELS)] == RANK_LABELS
        is_ours = is_ours and (is_leader or not metric.by_leader)
        if is_ours and name.startswith(prefixes) and LABEL_VALUES.keys() >= set(own):
            for values in itertools.product(*(sorted(LABEL_VALUES[label]) for label in own)):
                yield name, dict(zip(own, values, strict=True))
