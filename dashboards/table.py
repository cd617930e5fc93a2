"""All dashboards. `python -m dashboards.build` writes them as JSON."""

from __future__ import annotations

from dashboards.engines import MEMORY, OFFLOAD, RANKS, TRANSFERS
from dashboards.overview import EXPERIMENT, OVERVIEW
from rayk.metrics import METRICS

DASHBOARDS = (OVERVIEW, TRANSFERS, MEMORY, OFFLOAD, RANKS, EXPERIMENT)

NOT_SHOWN: dict[str, str] = {
    "rayk_engine_rank_info": "it is for joins: which stage, and which tokens, are a rank's",
    "rayk_spec_decode_num_undrafted_requests_total": "0 but where a prefill engine lacks the drafter",
    "rayk_spec_decode_num_undrafted_tokens_total": "the same, of cached prefixes",
}
"""Metrics that no panel shows, and why."""

ABSENT_ON_CPU = frozenset({"rayk_model_flops_utilization", "rayk_model_bandwidth_utilization"})
"""Metrics that a run without a GPU does not have."""
ABSENT_UNPACED = frozenset(name for name in METRICS if name.startswith("rayk_pace_"))
"""Metrics that engines which compute do not have."""
ABSENT_UNDRAFTED = frozenset(name for name in METRICS if name.startswith("rayk_spec_decode_"))
"""Metrics that engines which draft nothing do not have."""
ABSENT_WITHOUT_TIER = frozenset(name for name in METRICS if name.startswith("rayk_offload_"))
"""Metrics that a run without offload.host_gib does not have."""


def shown_metrics() -> frozenset[str]:
    """Every metric that some panel shows; what stands in for another one's absence does not count."""
    return frozenset(
        name
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
        for name in query.metrics
    )
