"""PromQL from metrics' own names: a metric, a label or a kind of use that the table of metrics does not have
is an error where the query is written.

`$model` and `$engine` are variables of the dashboards; a query is narrowed to them where its metric is
labelled so. Engines of every model have the same names: what is grouped by `engine` is by `model`, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayk.metrics import LABEL_VALUES, METRICS, Metric, MetricKind

FRONT_PREFIX = "rayk_front_"
VARIABLES = ("model", "engine")
WINDOW = "[$__rate_interval]"
SCRAPED = "instance"
"""Prometheus' own label: the address that was scraped. It tells fronts apart, which know of no model."""
_GROUPS = re.compile(r"\b(?:by|on) \(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    metrics: frozenset[str]
    """Names of the metrics it reads, as rayk.metrics has them."""
    legend: str = ""
    zero: Query | None = None
    """Shown where `expr` has nothing: a counter of what has not happened yet is not there at all."""

    def __post_init__(self) -> None:
        """Raises ValueError where engines of two models would be one, or be called alike."""
        for found in _GROUPS.findall(self.expr):
            if not _tells_engines_apart(found.split(", ")):
                raise ValueError(f"two models' engines are called alike, and this adds them up: {self.expr}")
        if not _tells_engines_apart(re.findall(r"{{(\w+)}}", self.legend)):
            raise ValueError(f"two models' engines would both be called {self.legend}")

    @property
    def shown(self) -> str:
        """What Grafana is given."""
        return f"({self.expr}) or {self.zero.expr}" if self.zero else self.expr

    def named(self, legend: str) -> Query:
        """The same, called `legend`; `{{label}}` stands for a label's value."""
        return replace(self, legend=legend)

    def or_zero(self, base: Query, *on: str) -> Query:
        """The same, and 0 for those of `base`, aggregated by `on`, that `expr` has nothing of."""
        labels = _with_model(on)
        return replace(self, zero=Query(f"on ({', '.join(labels)}) (0 * {base.expr})", base.metrics))


def exported(name: str) -> str:
    """What Prometheus calls a metric: Ray puts its own prefix before what comes through it."""
    return name if name.startswith(FRONT_PREFIX) else f"ray_{name}"


def known(name: str, kind: MetricKind, *labels: str) -> Metric:
    """The metric. Raises ValueError for another kind, and for labels that it does not have."""
    metric = METRICS.get(name)
    if metric is None:
        raise ValueError(f"no metric {name}: rayk/metrics/registry.py lists them")
    if metric.kind is not kind:
        raise ValueError(f"{name} is a {metric.kind}, not a {kind}")
    if unknown := [label for label in labels if label not in metric.labels]:
        raise ValueError(f"{name} has no label {', '.join(unknown)}: it has {', '.join(metric.labels)}")
    return metric


def rate(name: str, *by: str, **only: str) -> Query:
    """A counter's increase per second, added up by labels."""
    metric = known(name, MetricKind.COUNTER, *by, *only)
    return _aggregated("sum", f"rate({_select(metric, '', only)}{WINDOW})", metric, by)


def total(name: str, *by: str, **only: str) -> Query:
    """Where a counter stands, added up by labels: the first of what it counts shows at once."""
    metric = known(name, MetricKind.COUNTER, *by, *only)
    return _aggregated("sum", _select(metric, "", only), metric, by)


def value(name: str, *by: str, how: str = "sum", **only: str) -> Query:
    """A gauge, aggregated by labels: `how` is sum, max, min or avg."""
    metric = known(name, MetricKind.GAUGE, *by, *only)
    return _aggregated(how, _select(metric, "", only), metric, by)


def quantile(share: float, name: str, *by: str, **only: str) -> Query:
    """A quantile of a histogram, from its buckets."""
    metric = known(name, MetricKind.HISTOGRAM, *by, *only)
    labels = _labels(metric, ("le", *by))
    selected = _select(metric, f"_bucket{metric.series_ending}", only)
    buckets = f"sum by ({', '.join(labels)}) (rate({selected}{WINDOW}))"
    return Query(f"histogram_quantile({share}, {buckets})", frozenset({name}))


def observed(name: str, *by: str, **only: str) -> Query:
    """Observations per second of a histogram."""
    metric = known(name, MetricKind.HISTOGRAM, *by, *only)
    selected = _select(metric, f"_count{metric.series_ending}", only)
    return _aggregated("sum", f"rate({selected}{WINDOW})", metric, by)


def ratio(over: Query, under: Query) -> Query:
    """One by the other, series by series; both are to be aggregated by the same labels."""
    return Query(f"{over.expr} / {under.expr}", over.metrics | under.metrics)


def spread(query: Query, alive: Query) -> Query:
    """Between an engine's ranks: the most that one has of a query by rank less the least, of those ranks that
    `alive`, by rank as well, is above 0 of. Ranks of earlier lives keep their counters."""
    ranks = f"({query.expr} and on (model, engine, rank) {alive.expr} > 0)"
    most, least = (f"{how} by (model, engine) {ranks}" for how in ("max", "min"))
    return Query(f"{most} - {least}", query.metrics | alive.metrics)


def _tells_engines_apart(labels: Sequence[str]) -> bool:
    return "engine" not in labels or "model" in labels or SCRAPED in labels


def _with_model(labels: tuple[str, ...]) -> tuple[str, ...]:
    return labels if _tells_engines_apart(labels) else ("model", *labels)


def _labels(metric: Metric, by: tuple[str, ...]) -> tuple[str, ...]:
    """What a metric is grouped by."""
    if "model" not in metric.labels and "engine" in by:
        return (SCRAPED, *by)
    return _with_model(by)


def _aggregated(how: str, expr: str, metric: Metric, by: tuple[str, ...]) -> Query:
    labels = _labels(metric, by)
    grouped = f"{how} by ({', '.join(labels)})" if labels else how
    return Query(f"{grouped} ({expr})", frozenset({metric.name}))


def _select(metric: Metric, suffix: str, only: dict[str, str]) -> str:
    """A metric of the chosen models and engines; `only`: label values, or `!` and one to leave out."""
    matchers = [f'{v}=~"${v}"' for v in VARIABLES if v in metric.labels and _is_variable(metric, v)]
    for label, wanted in only.items():
        bare = wanted.removeprefix("!")
        if label in LABEL_VALUES and bare not in LABEL_VALUES[label]:
            raise ValueError(f"{metric.name}: {label} is never {bare}")
        matchers.append(f'{label}{"!=" if wanted.startswith("!") else "="}"{bare}"')
    return f"{exported(metric.name)}{suffix}{{{','.join(matchers)}}}"


def _is_variable(metric: Metric, label: str) -> bool:
    """A front names engines as its server does; the variables hold those that Ray tells of."""
    return not metric.name.startswith(FRONT_PREFIX) or label == "model"
