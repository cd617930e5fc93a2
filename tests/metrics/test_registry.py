"""The table of metrics against Prometheus' rules, and its labels against what they may be."""

from __future__ import annotations

import re
from itertools import pairwise

from rayk.actors.deployment_metrics import OUTCOMES
from rayk.engine.stats import ENDINGS
from rayk.metrics import LABEL_VALUES, METRICS, Metric, MetricKind, beginnings
from rayk.metrics.__main__ import table
from rayk.types.request import FinishReason
from rayk.types.verdicts import VERDICTS
from tests.each import each

OF_RANKS = {"rank", "stage", "tp_rank", "dcp_rank"}
OPEN_LABELS = {"model", "engine", *OF_RANKS, "group", "kind", "point", "path", "status", "run"}
"""As many values as a deployment has models, engines, ranks..."""
_UP_TO_1 = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
VLLM_TTFT = (*_UP_TO_1, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
VLLM_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Borders of vLLM's own histograms (vllm/v1/metrics/loggers.py), as far as two minutes."""
BY_METRIC = each("metric", METRICS.values(), ids=lambda metric: metric.name)


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
def test_a_quantile_of_times_is_off_by_less_than_two_and_a_half(metric: Metric) -> None:
    if metric.kind is MetricKind.HISTOGRAM and metric.unit == "s":
        assert max(b / a for a, b in pairwise(metric.buckets)) <= 2.5


def test_latencies_have_the_borders_that_vllm_has() -> None:
    assert {*VLLM_TTFT} <= {*METRICS["rayk_ttft_seconds"].buckets}
    assert {*VLLM_E2E} <= {*METRICS["rayk_e2e_seconds"].buckets}
    assert {*VLLM_ITL} <= {*METRICS["rayk_itl_seconds"].buckets} == {*METRICS["rayk_tpot_seconds"].buckets}


def test_what_begins_at_zero_is_every_counter_of_a_kind_with_every_value_of_its_labels() -> None:
    begun = list(beginnings(("rayk_nixl_", "rayk_kv_"), is_leader=True))
    names = {
        name
        for name, metric in METRICS.items()
        if metric.kind is MetricKind.COUNTER and name.startswith(("rayk_nixl_", "rayk_kv_"))
    }
    assert {name for name, _ in begun} == names
    reasons = [labels["reason"] for name, labels in begun if name == "rayk_nixl_num_failed_transfers_total"]
    assert sorted(reasons) == sorted(LABEL_VALUES["reason"])
    assert ("rayk_kv_mismatches_total", {}) in begun
    assert not list(beginnings(("rayk_faults_",), is_leader=True)), "its kinds are of no fixed set"
    others = {name for name, _ in beginnings(("rayk_nixl_", "rayk_kv_"), is_leader=False)}
    of_requests = {f"rayk_nixl_{what}_requests_total" for what in ("received", "failed", "expired")}
    assert names - others == of_requests, "rank 0 counts these for all"


@BY_METRIC
def test_no_label_grows_with_requests(metric: Metric) -> None:
    assert len(set(metric.labels)) == len(metric.labels)
    assert set(metric.labels) <= OPEN_LABELS | set(LABEL_VALUES), "a label of no known values"


def test_fixed_labels_have_the_values_of_what_they_name() -> None:
    assert LABEL_VALUES["verdict"] == set(VERDICTS)
    assert LABEL_VALUES["finish_reason"] == {*map(str, FinishReason), "error", "handed_over", "refused"}
    assert {*ENDINGS, *OUTCOMES} == LABEL_VALUES["finish_reason"]
    assert LABEL_VALUES["reason"] < LABEL_VALUES["verdict"]


def test_series_are_bounded() -> None:
    """Whatever runs, one rank has no more series than this, buckets included."""
    sizes = {label: len(values) for label, values in LABEL_VALUES.items()}
    sizes |= {"group": 16, "kind": 8, "point": 8} | dict.fromkeys(OF_RANKS, 1)
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
