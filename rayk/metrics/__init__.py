"""Hold every metric once (name, unit, help and labels) and the meter that a process reports them with. A
`Meter` passes values on to a `MetricsSink`, which actors fill with Ray's metrics. Names end in their unit, or
are those of the field."""

from rayk.metrics.meter import Meter, MetricsSink
from rayk.metrics.registry import LABEL_VALUES, METRICS, Metric, MetricKind, beginnings

__all__ = [
    "LABEL_VALUES",
    "METRICS",
    "Meter",
    "Metric",
    "MetricKind",
    "MetricsSink",
    "beginnings",
]
