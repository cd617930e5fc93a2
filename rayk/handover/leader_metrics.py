"""What an engine's rank 0 tells of its host tier, and what the tier's own process tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.handover.handover import TransferHandover
    from rayk.handover.offloading import Offloading
    from rayk.metrics import BufferedSink

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
NAME = "host"
"""Of a host tier among engines."""


def report_offload(sink: BufferedSink, offloading: Offloading) -> None:
    """On rank 0, before each flush."""
    counts = offloading.counts
    sink.set("rayk_offload_tier_up", float(offloading.is_on))
    for name, counter in OF_ENGINE.items():
        sink.total(name, counts[counter])
    for move, counter in FAILURES.items():
        sink.total("rayk_offload_failures_total", counts[counter], move=move)


def report_tier(sink: BufferedSink, status: Mapping[str, Any]) -> None:
    """Of a host tier's status, before each flush."""
    used, cached = status["num_used_blocks"], status["num_cached_blocks"]
    blocks = {"used": used, "cached": cached, "free": status["num_blocks"] - used - cached}
    for state, number in blocks.items():
        sink.set("rayk_offload_tier_blocks", number, state=state)
    sink.total("rayk_offload_tier_hits_total", status.get("hits", 0))
    sink.total("rayk_offload_tier_misses_total", status.get("misses", 0))
    disk = status.get("disk")
    if disk is None:
        return
    sink.set("rayk_offload_disk_up", float(disk["state"] == "on"))
    sink.set("rayk_offload_disk_bytes", disk["num_bytes"])
    for outcome, counter in PAGES.items():
        sink.total("rayk_offload_disk_pages_total", disk[counter], outcome=outcome)
    num_bad = sum(number for name, number in disk.items() if name.startswith("bad_"))
    sink.total("rayk_offload_disk_pages_total", num_bad, outcome="bad")


def report_requests(sink: BufferedSink, handover: TransferHandover) -> None:
    """Report requests, each once, at whichever ranks it failed or expired. On rank 0."""
    sink.set("rayk_num_requests_receiving", handover.num_awaited)
    sink.total("rayk_nixl_received_requests_total", handover.receiving.num_received)
    for reason, number in handover.receiving.num_failed.items():
        sink.total("rayk_nixl_failed_requests_total", number, reason=reason)
    sink.total("rayk_nixl_expired_requests_total", handover.num_expired_leases)
