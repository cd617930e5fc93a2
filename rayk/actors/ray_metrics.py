"""Metrics through Ray, which shows them on every node's Prometheus endpoint, under `ray_` and their name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rayk.metrics import METRICS, Meter, Metric, MetricKind
from rayk.types.model_names import short_name


class RaySink:
    """Implements MetricsSink. A call costs some 3 us: a `Meter` makes few of them."""

    def __init__(self, **known: str) -> None:
        """`known`: labels of every value, such as model, engine, role and rank."""
        # Here, so that a worker whose values nobody takes does without Ray.
        from rayk.actors.ray_private import record

        self._record = record
        self._known = known
        self._told: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        """Folded histograms that Ray has."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if value:
            _metric(name).inc(value, self._known | labels)
        else:
            self._record(_metric(name), 0.0, self._known | labels)  # what a counter begins with

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Ray forgets it two seconds later."""
        _metric(name).set(value, self._known | labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        _metric(name).observe(value, self._known | labels)

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add to the counters that make up a folded histogram, with a call for each bucket that grew."""
        tags = self._known | labels
        key = name, frozenset(tags.items())
        is_new = key not in self._told
        self._told.add(key)
        buckets, count, added = _counters(name)
        num_below = 0
        for border, number in zip(_borders(METRICS[name]), counts, strict=True):
            num_below += number
            if num_below or is_new:  # without those below it, a quantile would begin at 0
                self._record(buckets, num_below, tags | {"le": border})
        if num_below or is_new:
            self._record(count, num_below, tags)
            self._record(added, total, tags)

    def relabel(self, **labels: str) -> None:
        """Give known labels other values, for what follows."""
        self._known = self._known | labels


@functools.cache
def _metric(name: str) -> Any:
    """Make Ray's own metric; a process has one per name."""
    from ray.util.metrics import Counter, Gauge, Histogram

    metric = METRICS[name]
    what = metric.name, f"{metric.help} [{metric.unit}]"
    if metric.kind is MetricKind.COUNTER:
        return Counter(*what, tag_keys=metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return Gauge(*what, tag_keys=metric.labels)
    return Histogram(*what, boundaries=list(metric.buckets), tag_keys=metric.labels)


@functools.cache
def _counters(name: str) -> tuple[Any, Any, Any]:
    """Make the three counters of a folded histogram: its buckets, its count, its sum."""
    from ray.util.metrics import Counter

    metric = METRICS[name]
    of = {"bucket": (*metric.labels, "le"), "count": metric.labels, "sum": metric.labels}
    help_text = f"{metric.help} [{metric.unit}]"
    bucket, count, added = (
        Counter(f"{name}_{what}{metric.series_ending}", help_text, tag_keys=labels)
        for what, labels in of.items()
    )
    return bucket, count, added


def _borders(metric: Metric) -> Iterator[str]:
    """Write a histogram's borders as Prometheus' clients do."""
    yield from map(str, metric.buckets)
    yield "+Inf"


def make_meter(model: str | None = None, **known: str) -> Meter:
    """Make the meter of a process of a Ray cluster; outside of a cluster it drops all values. `model`: its
    folder or name, in short the label; `known`: other labels of every value, such as engine, role,
    rank."""
    import ray

    if model is not None:
        known["model"] = short_name(model) or model
    return Meter(RaySink(**known) if ray.is_initialized() else None)
