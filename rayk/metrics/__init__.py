"""Every metric once: name, unit, help and labels, and the sink that engines report to.

An engine calls a `MetricsSink`; actors fill it with Ray's metrics, tests and plain engines use
`NullSink`. Names end in their unit, as Prometheus likes them.
"""

from rayk.metrics.registry import METRICS, Metric, MetricKind
from rayk.metrics.sink import MetricsSink, NullSink

__all__ = ["METRICS", "Metric", "MetricKind", "MetricsSink", "NullSink"]
