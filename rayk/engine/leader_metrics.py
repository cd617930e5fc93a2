"""What rank 0 of an engine tells of its requests and blocks."""

from __future__ import annotations

from rayk.engine.leader import Leader
from rayk.metrics import BufferedSink

ENDINGS = ("stop", "length", "abort", "error", "handed_over")
"""How requests end at an engine."""


def report_leader(sink: BufferedSink, leader: Leader) -> None:
    """Pass on what a leader counted. Called when the sink is flushed."""
    total, scheduler = sink.total, leader.scheduler
    for reason in ENDINGS:
        total("rayk_requests_total", leader.num_ended[reason], finish_reason=reason)
    total("rayk_not_finite_requests_total", leader.num_not_finite)
    total("rayk_prompt_tokens_total", scheduler.num_prompt_tokens)
    total("rayk_generation_tokens_total", scheduler.num_output_tokens)
    total("rayk_num_preemptions_total", scheduler.num_preemptions)
    if leader.manager.prefixes is not None:
        total("rayk_prefix_cache_queries_total", scheduler.num_looked_up_tokens)
        total("rayk_prefix_cache_hits_total", scheduler.num_found_tokens)
    sink.set("rayk_num_requests_running", scheduler.num_running)
    sink.set("rayk_num_requests_waiting", scheduler.num_waiting)
    _report_blocks(sink, leader)


def _report_blocks(sink: BufferedSink, leader: Leader) -> None:
    counts = leader.manager.count_blocks()
    num_blocks = leader.manager.pool.num_blocks - 1
    for group, states in counts.items():
        for state, number in states.items():
            sink.set("rayk_kv_blocks", number, group=group, state=state)
    taken = counts["pool"]["used"] + counts["pool"]["leased"]
    sink.set("rayk_kv_pool_blocks", num_blocks)
    sink.set("rayk_kv_cache_usage_perc", taken / num_blocks)
