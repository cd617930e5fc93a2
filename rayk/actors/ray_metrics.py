"""Metrics through Ray, which shows them on every node's Prometheus endpoint, under `ray_` and their name."""

from __future__ import annotations

import functools
from typing import Any

from rayk.metrics import METRICS, BufferedSink, MetricKind, MetricsSink, NullSink


class RaySink:
    """Implements MetricsSink. A call costs some 3 us: see metrics.BufferedSink."""

    def __init__(self, **known: str) -> None:
        """`known`: labels of every value, such as model, engine, role and rank."""
        self._known = known

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if value:
            _metric(name).inc(value, self._known | labels)
        else:
            _metric(name)._record(0.0, self._known | labels)  # `inc` refuses what a counter begins with

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Ray forgets it two seconds later."""
        _metric(name).set(value, self._known | labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        _metric(name).observe(value, self._known | labels)

    def relabel(self, **labels: str) -> None:
        """What follows has these values of known labels."""
        self._known = self._known | labels


@functools.cache
def _metric(name: str) -> Any:
    """Ray's own, of which a process has one per name."""
    from ray.util.metrics import Counter, Gauge, Histogram

    metric = METRICS[name]
    what = metric.name, f"{metric.help} [{metric.unit}]"
    if metric.kind is MetricKind.COUNTER:
        return Counter(*what, tag_keys=metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return Gauge(*what, tag_keys=metric.labels)
    return Histogram(*what, boundaries=list(metric.buckets), tag_keys=metric.labels)


def make_sink(**known: str) -> BufferedSink:
    """Where a process of a Ray cluster reports; nowhere outside of one."""
    import ray

    sink: MetricsSink = RaySink(**known) if ray.is_initialized() else NullSink()
    return BufferedSink(sink)


def model_label(path: str) -> str:
    """How a model is named in labels: its folder's name."""
    return path.rstrip("/").rpartition("/")[2] or path
