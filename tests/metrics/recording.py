"""A sink that keeps what it is told, and refuses what the registry does not know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rayk.metrics import LABEL_VALUES, METRICS, MetricKind

Labels = tuple[tuple[str, str], ...]


class Recorder:
    """Implements metrics.MetricsSink. `known`: labels that it adds, as Ray's sink does."""

    def __init__(self, **known: str) -> None:
        self.known = known
        self.num_calls = 0
        self.counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.gauges: dict[str, dict[Labels, float]] = defaultdict(dict)
        self.folded: dict[str, dict[Labels, list[int]]] = defaultdict(dict)
        """Observations by bucket."""
        self.folded_sums: dict[str, float] = defaultdict(float)
        self.observed: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        assert value >= 0, f"Ray refuses to add {value} to {name}"
        self.counters[name][self._labels(name, MetricKind.COUNTER, labels)] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        self.gauges[name][self._labels(name, MetricKind.GAUGE, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._labels(name, MetricKind.HISTOGRAM, labels)
        assert not METRICS[name].is_folded, f"each {name} would be a call"
        self.observed[name].append(value)

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        key = self._labels(name, MetricKind.HISTOGRAM, labels)
        assert METRICS[name].is_folded
        assert len(counts) == len(METRICS[name].buckets) + 1
        before = self.folded[name].get(key, [0] * len(counts))
        self.folded[name][key] = [a + b for a, b in zip(before, counts, strict=True)]
        self.folded_sums[name] += total

    def relabel(self, **labels: str) -> None:
        self.known = self.known | labels

    def sum(self, name: str, **labels: str) -> float:
        """A counter over all labels but these."""
        wanted = set(labels.items())
        return sum(v for found, v in self.counters[name].items() if wanted <= set(found))

    def count(self, name: str, **labels: str) -> int:
        """Observations of a folded histogram over all labels but these."""
        wanted = set(labels.items())
        return sum(sum(counts) for found, counts in self.folded[name].items() if wanted <= set(found))

    def gauge(self, name: str, **labels: str) -> float:
        """The gauge that has these labels."""
        wanted = set(labels.items())
        (value,) = (v for found, v in self.gauges[name].items() if wanted <= set(found))
        return value

    def _labels(self, name: str, kind: MetricKind, labels: dict[str, str]) -> Labels:
        self.num_calls += 1
        metric = METRICS[name]
        assert metric.kind is kind, f"{name} is a {metric.kind}"
        given = self.known | labels
        assert set(given) == set(metric.labels), f"{name} has labels {metric.labels}, not {tuple(given)}"
        for label, value in given.items():
            if label in LABEL_VALUES:
                assert value in LABEL_VALUES[label], f"{name}: {label}={value} is none of the fixed set"
        return tuple(sorted(given.items()))
