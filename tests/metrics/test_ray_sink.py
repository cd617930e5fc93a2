"""What Ray is told of a folded histogram, without a cluster: the calls of its metrics, kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Histogram

from rayk.actors import ray_metrics
from rayk.actors.ray_metrics import RaySink
from rayk.metrics import METRICS, Meter

NAME = "rayk_itl_seconds"


class Kept:
    """In place of Ray's counter: what it would stand at, by tags."""

    values: dict[str, dict[frozenset[tuple[str, str]], float]]
    num_calls = 0

    def __init__(self, name: str, help_text: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys

    def _record(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        assert value >= 0
        Kept.num_calls += 1
        self.values[self.name][frozenset(tags.items())] += value


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Kept]]:
    Kept.values, Kept.num_calls = defaultdict(lambda: defaultdict(float)), 0
    monkeypatch.setattr("ray.util.metrics.Counter", Kept)
    ray_metrics._counters.cache_clear()
    yield Kept
    ray_metrics._counters.cache_clear()


def test_a_folded_histogram_is_prometheus_own_by_name_and_number(kept: type[Kept]) -> None:
    """Buckets, count and sum of Prometheus' client, under their names and `_total`; `le` as it writes it."""
    metric, registry = METRICS[NAME], CollectorRegistry()
    known = Histogram(NAME, "-", ("model",), buckets=metric.buckets, registry=registry).labels(model="m")
    meter = Meter(RaySink(model="m"))
    for values in ([], [0.004] * 30 + [0.0012], [0.2, 0.001], [77.0]):
        for value in values:
            known.observe(value)
        meter.observe_all(NAME, values)
        meter.flush()
    expected = {
        (f"{s.name}_total", frozenset(s.labels.items())): s.value
        for family in registry.collect()
        for s in family.samples
        if not s.name.endswith("_created")
    }
    found = {(name, tags): value for name, of in kept.values.items() for tags, value in of.items()}
    assert found == pytest.approx(expected)


def test_many_gaps_cost_ray_no_more_calls_than_there_are_buckets(kept: type[Kept]) -> None:
    meter = Meter(RaySink(model="m"))
    meter.observe_all(NAME, ())
    meter.flush()
    for num_gaps in (1, 10_000):
        Kept.num_calls = 0
        meter.observe_all(NAME, [0.004] * num_gaps)
        meter.flush()
        borders = [b for b in METRICS[NAME].buckets if b >= 0.004]
        assert kept.num_calls == len(borders) + 1 + 2, "the buckets that grew, count and sum"
