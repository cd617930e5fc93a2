"""The table of metrics against Prometheus' rules, and its labels against what they may be."""

from __future__ import annotations

import re

import pytest

from rayk.metrics import LABEL_VALUES, METRICS, Metric, MetricKind
from rayk.metrics.__main__ import table
from rayk.specs.experiment import VERDICTS
from rayk.types.request import FinishReason

OPEN_LABELS = {"model", "engine", "rank", "group", "kind", "point", "path", "status"}
"""As many values as a deployment has models, engines, ranks..."""
BY_METRIC = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


@BY_METRIC
def test_names_are_prometheus_own(metric: Metric) -> None:
    assert re.fullmatch(r"rayk_[a-z0-9_]+", metric.name)
    # Ray and Prometheus' clients add _total to counters that lack it: dashboards would look for another name.
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert not re.search(r"_(sum|count|bucket)$", metric.name), "these are a histogram's own series"
    assert metric.help
    assert not metric.help.endswith(".")
    assert metric.unit


@BY_METRIC
def test_histograms_and_only_they_have_ascending_positive_buckets(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(border > 0 for border in metric.buckets), "Ray takes no others"


@BY_METRIC
def test_no_label_grows_with_requests(metric: Metric) -> None:
    assert len(set(metric.labels)) == len(metric.labels)
    assert set(metric.labels) <= OPEN_LABELS | set(LABEL_VALUES), "a label of no known values"


def test_fixed_labels_have_the_values_of_what_they_name() -> None:
    assert LABEL_VALUES["verdict"] == set(VERDICTS)
    assert LABEL_VALUES["finish_reason"] == {*map(str, FinishReason), "error", "handed_over"}
    assert LABEL_VALUES["reason"] < LABEL_VALUES["verdict"]


def test_series_are_bounded() -> None:
    """Whatever runs, one rank has no more series than this, buckets included."""
    sizes = {label: len(values) for label, values in LABEL_VALUES.items()}
    sizes |= {"group": 16, "kind": 8, "point": 8}
    known = {"model", "engine", "role", "rank"}
    num_series = 0
    for metric in METRICS.values():
        if not known <= set(metric.labels):
            continue
        series = 1
        for label in set(metric.labels) - known:
            series *= sizes[label]
        num_series += series * (len(metric.buckets) + 3 if metric.buckets else 1)
    assert num_series < 500


def test_the_table_for_people_has_every_metric_once() -> None:
    names = [line.split("|")[1].strip() for line in table().splitlines()[2:]]
    assert [n.removeprefix("ray_") for n in names] == list(METRICS)
