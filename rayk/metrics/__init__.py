"""Every metric once: name, unit, help and labels, and the sink that engines report to.

`MetricsSink` is what a reporter calls; actors fill it with Ray's metrics, behind a `BufferedSink` where calls
must cost next to nothing. Names end in their unit, or are those of the field.
"""

from rayk.metrics.buffer import BufferedSink
from rayk.metrics.registry import LABEL_VALUES, METRICS, Metric, MetricKind, beginnings
from rayk.metrics.sink import MetricsSink, NullSink

__all__ = [
    "LABEL_VALUES",
    "METRICS",
    "BufferedSink",
    "Metric",
    "MetricKind",
    "MetricsSink",
    "NullSink",
    "beginnings",
]
