"""What ranks report of transfers, rank 0 of the requests that these were parts of and of its host tier, and
the tier's own process of the tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayk.metrics import beginnings
from rayk.types.errors import KVMismatch
from rayk.types.rows import TransferRow, moving_ns
from rayk.types.verdicts import verdict_of

if TYPE_CHECKING:
    from rayk.handover.commands import RankNews
    from rayk.handover.handover import TransferHandover
    from rayk.handover.offloading import Offloading
    from rayk.metrics import Meter
    from rayk.transfer.consumer import TransferOutcome

OF_ENGINE = {
    "rayk_offload_tier_losses_total": "tier_losses",
    "rayk_offload_stored_bytes_total": "stored_bytes",
    "rayk_offload_loaded_bytes_total": "loaded_bytes",
    "rayk_offload_loaded_tokens_total": "loaded_tokens",
    "rayk_offload_swapped_out_bytes_total": "swapped_out_bytes",
    "rayk_offload_swapped_in_bytes_total": "swapped_in_bytes",
    "rayk_offload_lookups_total": "lookups",
    "rayk_offload_loads_total": "loads",
    "rayk_offload_swaps_total": "swaps",
}
"""Metric -> an engine's counter."""
FAILURES = {"store": "stores_failed", "load": "loads_failed", "swap": "swaps_failed"}
"""Move -> an engine's counter."""
PAGES = {name: f"pages_{name}" for name in ("written", "read", "evicted", "dropped")}
"""Outcome -> a disk tier's counter."""
TIER_NAME = "host"
"""How a host tier is called where others have an engine's name."""


def begin_transfers(meter: Meter, *, is_leader: bool) -> None:
    """Make the counters of transfers exist at 0, on a rank that has partners."""
    for name, labels in beginnings(("rayk_nixl_", "rayk_kv_"), is_leader=is_leader):
        meter.add(name, 0.0, **labels)


def watch_handover(meter: Meter, handover: TransferHandover) -> None:
    """Report at each flush, on rank 0, what the hand-over and its host tier counted."""
    meter.on_flush(lambda: _report_requests(meter, handover))
    offloading = handover.offloading
    if offloading is not None:
        meter.on_flush(lambda: report_offload(meter, offloading))


def report_news(meter: Meter, news: RankNews) -> None:
    """Report what a rank tells its leader."""
    for outcome in news.outcomes:
        _report_outcome(meter, outcome)
    if news.expired:
        meter.add("rayk_nixl_num_kv_expired_reqs_total", len(news.expired))


def report_totals(
    meter: Meter, num_unsent: int, fault_counts: Sequence[Mapping[tuple[str, str], int]]
) -> None:
    """Report what a rank counts elsewhere. `fault_counts`: planted faults by kind and point, of
    unlike kinds."""
    meter.total("rayk_nixl_num_failed_notifications_total", num_unsent)
    for counts in fault_counts:
        for (kind, point), number in counts.items():
            meter.total("rayk_faults_total", number, kind=kind, point=point)


def _report_outcome(meter: Meter, outcome: TransferOutcome) -> None:
    if outcome.rows:
        _report_rows(meter, outcome.rows)
    if outcome.error is not None:
        meter.add("rayk_nixl_num_failed_transfers_total", reason=verdict_of(outcome.error))
    if outcome.num_bytes_checked:
        meter.add("rayk_kv_digest_checks_total")
        meter.add("rayk_kv_bytes_checked_total", outcome.num_bytes_checked)
    if isinstance(outcome.error, KVMismatch):
        meter.add("rayk_kv_mismatches_total")
        meter.add("rayk_kv_mismatched_words_total", max(1, len(outcome.wrong_words)))


def _report_rows(meter: Meter, rows: Sequence[TransferRow]) -> None:
    """Report all that came to this rank of one request. Its reads, from whichever ranks, are posted one after
    the other: they take from the first post to the last completion."""
    mode = rows[0].mode
    num_bytes, num_descriptors = sum(r.bytes for r in rows), sum(r.num_descriptors for r in rows)
    post_s, transfer_s = sum(r.post_ns for r in rows) / 1e9, moving_ns(rows) / 1e9
    meter.add("rayk_nixl_transfers_total", mode=mode)
    meter.add("rayk_nixl_bytes_total", num_bytes, mode=mode)
    meter.add("rayk_nixl_descriptors_total", num_descriptors, mode=mode)
    meter.add("rayk_nixl_descriptors_posted_total", _num_posted(rows), mode=mode)
    meter.add("rayk_nixl_post_seconds_total", post_s, mode=mode)
    meter.add("rayk_nixl_wait_seconds_total", max(0.0, transfer_s - post_s), mode=mode)
    if any(r.staged for r in rows):
        meter.add("rayk_nixl_staged_total", mode=mode)
    meter.observe("rayk_nixl_xfer_time_seconds", transfer_s)
    meter.observe("rayk_nixl_post_time_seconds", post_s)
    meter.observe("rayk_nixl_bytes_transferred", num_bytes)
    meter.observe("rayk_nixl_num_descriptors", num_descriptors)


def _num_posted(rows: Sequence[TransferRow]) -> int:
    """Count descriptors that the transport was given: as many as were asked for where nothing is merged."""
    return sum(r.num_descriptors if (n := r.num_descriptors_merged) is None else n for r in rows)


def _report_requests(meter: Meter, handover: TransferHandover) -> None:
    """Report requests, each once, at however many ranks it failed or expired."""
    meter.set("rayk_num_requests_receiving", handover.num_awaited)
    meter.total("rayk_nixl_received_requests_total", handover.receiving.num_received)
    for reason, number in handover.receiving.num_failed.items():
        meter.total("rayk_nixl_failed_requests_total", number, reason=reason)
    meter.total("rayk_nixl_expired_requests_total", handover.num_expired_leases)


def report_offload(meter: Meter, offloading: Offloading) -> None:
    """Report what an engine's rank 0 counted of its host tier."""
    counts = offloading.counts
    meter.set("rayk_offload_tier_up", float(offloading.is_on))
    for name, counter in OF_ENGINE.items():
        meter.total(name, counts[counter])
    for move, counter in FAILURES.items():
        meter.total("rayk_offload_failures_total", counts[counter], move=move)


def report_tier(meter: Meter, status: Mapping[str, Any]) -> None:
    """Report a host tier's status."""
    used, cached = status["num_used_blocks"], status["num_cached_blocks"]
    blocks = {"used": used, "cached": cached, "free": status["num_blocks"] - used - cached}
    for state, number in blocks.items():
        meter.set("rayk_offload_tier_blocks", number, state=state)
    meter.total("rayk_offload_tier_hits_total", status.get("hits", 0))
    meter.total("rayk_offload_tier_misses_total", status.get("misses", 0))
    disk = status.get("disk")
    if disk is None:
        return
    meter.set("rayk_offload_disk_up", float(disk["state"] == "on"))
    meter.set("rayk_offload_disk_bytes", disk["num_bytes"])
    for outcome, counter in PAGES.items():
        meter.total("rayk_offload_disk_pages_total", disk[counter], outcome=outcome)
    num_bad = sum(number for name, number in disk.items() if name.startswith("bad_"))
    meter.total("rayk_offload_disk_pages_total", num_bad, outcome="bad")
