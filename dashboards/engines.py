"""The dashboards of people who look into engines."""

from __future__ import annotations

from dashboards.panels import RANK_TURNS, TURNS, Dashboard, Panel, per_engine, per_rank, sizes
from dashboards.queries import (
    Query,
    observed,
    quantile,
    rate,
    ratio,
    spread,
    total,
    value,
)

TRANSFERS = Dashboard(
    uid="rayk-transfers",
    title="rayk / Prefill, decode and transfers",
    help="What hands over, how fast, and what of it fails.",
    panels=(
        per_engine("Bytes received", "rayk_nixl_bytes_total", "KV, all ranks of an engine.", unit="Bps"),
        Panel(
            title="Hand-overs",
            help="Requests whose KV came to all ranks of an engine, and was right. By rank: what came to it.",
            queries=(
                rate("rayk_nixl_received_requests_total", "engine").named("{{model}}/{{engine}}"),
                rate("rayk_nixl_transfers_total", "engine", "rank").named("{{model}}/{{engine}}/{{rank}}"),
            ),
            unit="ops",
        ),
        Panel(
            title="Descriptors",
            help="Contiguous pieces, and what was posted once neighbours went as one: fewer is cheaper.",
            queries=(
                rate("rayk_nixl_descriptors_total", "engine").named("{{model}}/{{engine}}"),
                rate("rayk_nixl_descriptors_posted_total", "engine").named("{{model}}/{{engine}} posted"),
            ),
            unit="ops",
        ),
        Panel(
            title="Bytes per descriptor",
            help="How finely KV is cut: small ones are what heterogeneous TP costs. Posted: as it went.",
            queries=(
                ratio(
                    rate("rayk_nixl_bytes_total", "engine"), rate("rayk_nixl_descriptors_total", "engine")
                ).named("{{model}}/{{engine}}"),
                ratio(
                    rate("rayk_nixl_bytes_total", "engine"),
                    rate("rayk_nixl_descriptors_posted_total", "engine"),
                ).named("{{model}}/{{engine}} posted"),
            ),
            unit="bytes",
        ),
        Panel(
            title="Rate while transferring",
            help="Bytes by the time spent posting and waiting: what one rank's link gives.",
            queries=(
                Query(
                    f"{rate('rayk_nixl_bytes_total', 'engine').expr} / "
                    f"({rate('rayk_nixl_post_seconds_total', 'engine').expr} + "
                    f"{rate('rayk_nixl_wait_seconds_total', 'engine').expr})",
                    frozenset(
                        {
                            "rayk_nixl_bytes_total",
                            "rayk_nixl_post_seconds_total",
                            "rayk_nixl_wait_seconds_total",
                        }
                    ),
                    "{{model}}/{{engine}}",
                ),
            ),
            unit="Bps",
        ),
        Panel(
            title="Posting and waiting",
            help="Seconds per second, all ranks of an engine.",
            queries=(
                rate("rayk_nixl_post_seconds_total", "engine").named("{{model}}/{{engine}} post"),
                rate("rayk_nixl_wait_seconds_total", "engine").named("{{model}}/{{engine}} wait"),
            ),
            unit="s",
        ),
        sizes("Transfer time", "rayk_nixl_xfer_time_seconds", "s", "First post to last completion."),
        sizes("Post time", "rayk_nixl_post_time_seconds", "s", "The part of it that the host is busy."),
        sizes("Bytes of a hand-over", "rayk_nixl_bytes_transferred", "bytes", "To one rank."),
        sizes("Descriptors of a hand-over", "rayk_nixl_num_descriptors", "short", "To one rank."),
        Panel(
            title="Steps by phase",
            help="Of rank 0: prefill, decode, and both in one.",
            queries=(
                rate("rayk_steps_total", "engine", "phase", rank="0").named("{{model}}/{{engine}} {{phase}}"),
            ),
            unit="ops",
        ),
        Panel(
            title="Time busy, by phase",
            help="Share of the time that rank 0 spends in turns that have a step: near 1, it is the limit.",
            queries=(
                rate("rayk_step_busy_seconds_total", "engine", "phase", rank="0").named(
                    "{{model}}/{{engine}} {{phase}}"
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Failed transfers",
            help="Requests whose KV did not come, or came wrong, by reason, since Ray started: each once, at "
            "however many ranks it failed.",
            queries=(
                total("rayk_nixl_failed_requests_total", "engine", "reason")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}} {{reason}}"),
            ),
        ),
        Panel(
            title="Failed transfers, by rank",
            help="Which ranks saw an error: one alone hints at its link or its device.",
            queries=(
                total("rayk_nixl_num_failed_transfers_total", "engine", "rank", "reason")
                .or_zero(RANK_TURNS, "engine", "rank")
                .named("{{model}}/{{engine}}/{{rank}} {{reason}}"),
            ),
        ),
        Panel(
            title="Messages nobody could take",
            help="Notifications that could not be read, since each engine started.",
            queries=(
                total("rayk_nixl_num_failed_notifications_total", "engine")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}}"),
            ),
        ),
        Panel(
            title="Leases that expired",
            help="Requests whose blocks were held for a consumer that never released them; by rank: leases.",
            queries=(
                total("rayk_nixl_expired_requests_total", "engine")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}}"),
                total("rayk_nixl_num_kv_expired_reqs_total", "engine", "rank")
                .or_zero(RANK_TURNS, "engine", "rank")
                .named("{{model}}/{{engine}}/{{rank}}"),
            ),
        ),
        Panel(
            title="Through a staging buffer",
            help="Hand-overs to one rank that were gathered first.",
            queries=(
                total("rayk_nixl_staged_total", "engine", "rank", "mode")
                .or_zero(RANK_TURNS, "engine", "rank")
                .named("{{model}}/{{engine}}/{{rank}} {{mode}}"),
            ),
        ),
        Panel(
            title="Digests compared",
            help="Times that a rank compared those of a request.",
            queries=(
                rate("rayk_kv_digest_checks_total", "engine", "rank").named("{{model}}/{{engine}}/{{rank}}"),
            ),
            unit="ops",
        ),
        per_engine(
            "Bytes behind digests",
            "rayk_kv_bytes_checked_total",
            "Compared, all ranks of an engine.",
            unit="Bps",
        ),
        Panel(
            title="Digests that differed",
            help="Requests. Anything but 0 is KV that was read wrong. By rank: which of them saw it. The "
            "alarm ends after half an hour, this does not.",
            queries=(
                total("rayk_nixl_failed_requests_total", "engine", reason="KV_MISMATCH")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}}"),
                total("rayk_kv_mismatches_total", "engine", "rank")
                .or_zero(RANK_TURNS, "engine", "rank")
                .named("{{model}}/{{engine}}/{{rank}}"),
            ),
        ),
        Panel(
            title="Digest words that differed",
            help="By rank: one is a spot, many are a layer or a request that is not what it should be.",
            queries=(
                total("rayk_kv_mismatched_words_total", "engine", "rank")
                .or_zero(RANK_TURNS, "engine", "rank")
                .named("{{model}}/{{engine}}/{{rank}}"),
            ),
        ),
        Panel(
            title="Planted faults",
            help="What the experiment broke on purpose.",
            queries=(
                total("rayk_faults_total", "engine", "kind", "point")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}} {{kind}} {{point}}"),
            ),
        ),
    ),
)

MEMORY = Dashboard(
    uid="rayk-memory",
    title="rayk / KV memory",
    help="Who holds the pool's blocks, and what caching saves.",
    panels=(
        Panel(
            title="Pool taken",
            help="Used or leased. From 95 % on, requests wait or are preempted.",
            queries=(value("rayk_kv_cache_usage_perc", "engine", how="max").named("{{model}}/{{engine}}"),),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Pool size",
            help="Blocks of each engine.",
            queries=(value("rayk_kv_pool_blocks", "engine", how="max").named("{{model}}/{{engine}}"),),
            width=12,
        ),
        Panel(
            title="Blocks by state",
            help="Cached ones are free to take; leased ones wait for another engine.",
            queries=(
                value("rayk_kv_blocks", "engine", "state", how="max", group="pool").named(
                    "{{model}}/{{engine}} {{state}}"
                ),
            ),
            is_stacked=True,
            width=12,
        ),
        Panel(
            title="Blocks by group",
            help="Used and leased, by group of layers.",
            queries=(
                value("rayk_kv_blocks", "engine", "group", "state", how="max", group="!pool").named(
                    "{{model}}/{{engine}} {{group}} {{state}}"
                ),
            ),
            width=12,
        ),
        Panel(
            title="Prefix cache hits",
            help="Share of looked-up prompt tokens that were found. None without engine.prefix_caching.",
            queries=(
                ratio(
                    rate("rayk_prefix_cache_hits_total", "engine"),
                    rate("rayk_prefix_cache_queries_total", "engine"),
                ).named("{{model}}/{{engine}}"),
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Preemptions",
            help="Requests that lost their blocks, since each engine started: the pool is too small.",
            queries=(
                total("rayk_num_preemptions_total", "engine")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}}"),
            ),
            width=12,
        ),
    ),
)


def _moved(direction: str, name: str) -> Query:
    return rate(name, "engine").named(f"{{{{model}}}}/{{{{engine}}}} {direction}")


OFFLOAD = Dashboard(
    uid="rayk-offload",
    title="rayk / KV in host memory and on disk",
    help="What engines keep in their host tier, and what that saves. Empty without offload.host_gib.",
    panels=(
        Panel(
            title="Has its tier",
            help="0: the engine goes on without, and computes all it has not cached itself.",
            queries=(value("rayk_offload_tier_up", "engine", how="max").named("{{model}}/{{engine}}"),),
        ),
        Panel(
            title="Tiers lost",
            help="Times that an engine lost its tier, since each engine started.",
            queries=(total("rayk_offload_tier_losses_total", "engine").named("{{model}}/{{engine}}"),),
        ),
        Panel(
            title="Moves that failed",
            help="Since each engine started: what was to be loaded or to come back was computed.",
            queries=(
                total("rayk_offload_failures_total", "engine", "move").named("{{model}}/{{engine}} {{move}}"),
            ),
        ),
        Panel(
            title="Moved",
            help="KV to and from the host tier; stored includes what is swapped out.",
            queries=(
                _moved("stored", "rayk_offload_stored_bytes_total"),
                _moved("loaded", "rayk_offload_loaded_bytes_total"),
                _moved("swapped out", "rayk_offload_swapped_out_bytes_total"),
                _moved("swapped in", "rayk_offload_swapped_in_bytes_total"),
            ),
            unit="Bps",
            width=12,
        ),
        Panel(
            title="Prompt tokens not computed",
            help="Their KV came from the host tier.",
            queries=(rate("rayk_offload_loaded_tokens_total", "engine").named("{{model}}/{{engine}}"),),
            width=12,
        ),
        Panel(
            title="Prompts asked about",
            help="Per second, and of how many something was loaded.",
            queries=(
                _moved("asked", "rayk_offload_lookups_total"),
                _moved("loaded", "rayk_offload_loads_total"),
            ),
            unit="ops",
            width=12,
        ),
        Panel(
            title="Swapped out",
            help="Preempted requests whose KV was moved, not computed again, since each engine started.",
            queries=(total("rayk_offload_swaps_total", "engine").named("{{model}}/{{engine}}"),),
            width=12,
        ),
        Panel(
            title="Blocks of the tier",
            help="Cached ones are found by their tokens and go first, the oldest before others.",
            queries=(value("rayk_offload_tier_blocks", "model", "state").named("{{model}} {{state}}"),),
            is_stacked=True,
        ),
        Panel(
            title="Found there",
            help="Share of the questions to the tier that it had something for, swapped requests included.",
            queries=(
                Query(
                    f"{rate('rayk_offload_tier_hits_total', 'model').expr} / "
                    f"({rate('rayk_offload_tier_hits_total', 'model').expr} + "
                    f"{rate('rayk_offload_tier_misses_total', 'model').expr})",
                    frozenset({"rayk_offload_tier_hits_total", "rayk_offload_tier_misses_total"}),
                    "{{model}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="On disk",
            help="What page files take; up to offload.disk_gib.",
            queries=(value("rayk_offload_disk_bytes", "model").named("{{model}}"),),
            unit="bytes",
        ),
        Panel(
            title="Disk is written",
            help="0: it is full, read-only or has failed; pages that can be read still are.",
            queries=(value("rayk_offload_disk_up", "model", how="min").named("{{model}}"),),
        ),
        Panel(
            title="Pages on disk",
            help="Since the tier was opened. Bad ones were damaged or gone, and never served; dropped ones: "
            "the disk does not keep up, or is off.",
            queries=(
                total("rayk_offload_disk_pages_total", "model", "outcome").named("{{model}} {{outcome}}"),
            ),
            width=12,
        ),
    ),
)


_MODEL_SECONDS = rate("rayk_model_seconds_total", "engine", "rank")
_IN_COLLECTIVES = rate("rayk_collective_seconds_total", "engine", "rank")

RANKS = Dashboard(
    uid="rayk-ranks",
    title="rayk / Ranks",
    help="Whether an engine's ranks keep pace, and what of the machine they use.",
    panels=(
        per_rank("Turns", "0: this rank stands still.", rate("rayk_turns_total", "engine", "rank"), "ops"),
        per_rank(
            "Busy",
            "Share of the time in turns that have a step.",
            rate("rayk_step_busy_seconds_total", "engine", "rank"),
            "percentunit",
        ),
        per_rank("Model", "Share of the time in the forward pass.", _MODEL_SECONDS, "percentunit"),
        per_rank(
            "In collectives",
            "Share of the time. The rank that waits least is the one others wait for.",
            _IN_COLLECTIVES,
            "percentunit",
        ),
        Panel(
            title="Skew",
            help="Share of the time that an engine's quickest rank waits longer in collectives than its "
            "slowest, of ranks that turn. For a moment, an engine formed again with fewer ranks shows those "
            "of both lives. Only where collectives take the host's time (gloo, shared memory): a GPU's "
            "(NCCL) end on its stream, and are not timed.",
            queries=(spread(_IN_COLLECTIVES, RANK_TURNS).named("{{model}}/{{engine}}"),),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Step time",
            help="Turns that have a step, of rank 0.",
            queries=tuple(
                quantile(share, "rayk_step_seconds", "engine", "phase", rank="0").named(
                    f"{p} {{{{model}}}}/{{{{engine}}}} {{{{phase}}}}"
                )
                for share, p in ((0.5, "p50"), (0.95, "p95"))
            ),
            unit="s",
            width=12,
        ),
        sizes("Tokens of a step", "rayk_iteration_tokens", "short", "Of all its requests."),
        sizes("Requests of a step", "rayk_batch_requests", "short", "The batch."),
        Panel(
            title="Steps observed",
            help="Per second and rank, as the histogram of step times has them.",
            queries=(observed("rayk_step_seconds", "engine", "rank").named("{{model}}/{{engine}}/{{rank}}"),),
            unit="ops",
        ),
        per_rank(
            "Model FLOP/s",
            "While the model ran.",
            value("rayk_model_flops_per_second", "engine", "rank", how="max"),
            "flops",
        ),
        per_rank(
            "Model bytes/s",
            "Weights and KV read while the model ran.",
            value("rayk_model_bytes_per_second", "engine", "rank", how="max"),
            "Bps",
        ),
        per_rank(
            "FLOP on average",
            "Also counts the time between steps.",
            rate("rayk_estimated_flops_per_gpu_total", "engine", "rank"),
            "flops",
        ),
        per_rank(
            "Bytes read on average",
            "Also counts the time between steps.",
            rate("rayk_estimated_read_bytes_per_gpu_total", "engine", "rank"),
            "Bps",
        ),
        per_rank(
            "FLOP utilisation",
            "Of the device's peak; only where that is known (not on CPUs).",
            value("rayk_model_flops_utilization", "engine", "rank", how="max"),
            "percentunit",
        ),
        per_rank(
            "Bandwidth utilisation",
            "Of the device's peak; only where that is known (not on CPUs).",
            value("rayk_model_bandwidth_utilization", "engine", "rank", how="max"),
            "percentunit",
        ),
        Panel(
            title="Paced steps came late",
            help="The 99th percentile, of a step's length, and how busy the machine was meanwhile. Over 10 % "
            "or 70 % times are not the cost tables'. Only of engines with `compute: paced`.",
            queries=(
                value("rayk_pace_late_share", "engine", how="max").named("{{model}}/{{engine}} late"),
                value("rayk_pace_machine_busy_share", "engine", how="max").named("{{model}}/{{engine}} busy"),
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Paced steps outside the tables",
            help="Per second: steps unlike those that the cost tables were fitted to.",
            queries=(rate("rayk_pace_outside_steps_total", "engine").named("{{model}}/{{engine}}"),),
            unit="ops",
            width=12,
        ),
    ),
)
