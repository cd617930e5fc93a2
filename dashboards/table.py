"""All dashboards. `python -m dashboards.build` writes them as JSON."""

from __future__ import annotations

from dashboards.engines import MEMORY, RANKS, TRANSFERS
from dashboards.overview import EXPERIMENT, OVERVIEW

DASHBOARDS = (OVERVIEW, TRANSFERS, MEMORY, RANKS, EXPERIMENT)

NOT_SHOWN: dict[str, str] = {}
"""Metrics that no panel shows, and why."""

ABSENT_ON_CPU = frozenset({"rayk_model_flops_utilization", "rayk_model_bandwidth_utilization"})
"""Metrics that a run without a GPU does not have."""


def shown_metrics() -> frozenset[str]:
    """Every metric that some panel shows; what stands in for another one's absence does not count."""
    return frozenset(
        name
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
        for name in query.metrics
    )
