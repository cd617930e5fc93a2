"""Every metric once: name, unit, help and labels, and the sink that engines report to.

`MetricsSink` is what a reporter is to call; nothing reports yet. Names end in their unit, as Prometheus
likes them.
"""

from rayk.metrics.registry import METRICS, Metric, MetricKind
from rayk.metrics.sink import MetricsSink, NullSink

__all__ = ["METRICS", "Metric", "MetricKind", "MetricsSink", "NullSink"]
