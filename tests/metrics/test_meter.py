"""What is buffered arrives, once, in sums; gauges are told again and again."""

from __future__ import annotations

import itertools
import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from rayk.metrics import METRICS, Meter
from rayk.metrics.meter import FLUSH_S, OBSERVED_PER_TICK
from tests.metrics.recording import Recorder

KNOWN = {"model": "m", "engine": "e", "role": "decode", "rank": "0"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sums_are_passed_on_whole_whatever_the_rhythm() -> None:
    rng, clock, recorder = random.Random(7), Clock(), Recorder(**KNOWN)
    meter = Meter(recorder, clock)
    expected = {"pull": 0, "push": 0}
    for _ in range(500):
        mode, num_bytes = rng.choice(("pull", "push")), rng.randrange(0, 1 << 40)
        expected[mode] += num_bytes
        meter.add("rayk_nixl_bytes_total", num_bytes, mode=mode)
        clock.now += rng.random() * FLUSH_S
        meter.tick()
    meter.flush()
    assert {mode: recorder.sum("rayk_nixl_bytes_total", mode=mode) for mode in expected} == expected


def test_totals_that_others_count_are_told_as_differences() -> None:
    recorder = Recorder(**KNOWN)
    meter = Meter(recorder)
    for total in (0, 3, 3, 10):
        meter.total("rayk_turns_total", total)
        meter.flush()
    assert recorder.sum("rayk_turns_total") == 10
    assert recorder.num_calls == 3, "that it is there, and nothing of what did not change"


def test_a_counter_is_there_before_it_counts_and_is_told_once() -> None:
    recorder = Recorder(**KNOWN)
    meter = Meter(recorder)
    for _ in range(3):
        meter.add("rayk_kv_mismatches_total", 0.0)
        meter.add("rayk_nixl_bytes_total", 0.0, mode="pull")
        meter.flush()
    assert list(recorder.counters["rayk_kv_mismatches_total"].values()) == [0.0]
    assert list(recorder.counters["rayk_nixl_bytes_total"].values()) == [0.0]
    assert recorder.num_calls == 2


def test_what_is_told_of_a_new_role_has_its_label_and_the_old_one_keeps_what_it_had() -> None:
    recorder = Recorder(**KNOWN)
    meter = Meter(recorder)
    meter.total("rayk_turns_total", 5)
    meter.set("rayk_num_requests_running", 3)
    meter.flush()
    meter.relabel(role="prefill")
    recorder.gauges.clear()
    meter.total("rayk_turns_total", 12)
    meter.flush()
    assert recorder.sum("rayk_turns_total", role="decode") == 5
    assert recorder.sum("rayk_turns_total", role="prefill") == 7
    assert recorder.gauge("rayk_num_requests_running", role="prefill") == 3, "and no other one is told again"


def test_a_gauge_that_is_forgotten_is_told_no_more() -> None:
    recorder = Recorder(**KNOWN)
    meter = Meter(recorder)
    meter.set("rayk_kv_blocks", 3, group="0", state="used")
    meter.set("rayk_kv_blocks", 4, group="0", state="free")
    meter.forget("rayk_kv_blocks", group="0", state="used")
    meter.flush()
    assert list(recorder.gauges["rayk_kv_blocks"].values()) == [4]


def test_counters_cost_one_call_per_flush() -> None:
    clock, recorder = Clock(), Recorder(**KNOWN)
    meter = Meter(recorder, clock)
    for _ in range(1000):
        meter.add("rayk_turns_total")
        meter.tick()
    assert recorder.num_calls == 0
    clock.now = FLUSH_S
    meter.tick()
    assert (recorder.num_calls, recorder.sum("rayk_turns_total")) == (1, 1000)


def test_gauges_are_told_again_for_ray_forgets_them() -> None:
    clock, recorder = Clock(), Recorder(**KNOWN)
    meter = Meter(recorder, clock)
    meter.set("rayk_num_requests_running", 3)
    for _ in range(4):
        clock.now += FLUSH_S
        meter.tick()
    assert recorder.num_calls == 4
    assert recorder.gauge("rayk_num_requests_running") == 3
    assert FLUSH_S <= 1.0, "Ray forgets a gauge after two seconds"


def test_observations_come_in_order_and_few_at_a_time() -> None:
    recorder = Recorder(**KNOWN)
    meter = Meter(recorder, Clock())
    values = [float(i) for i in range(3 * OBSERVED_PER_TICK)]
    for value in values:
        meter.observe("rayk_nixl_num_descriptors", value)
    meter.tick()
    assert recorder.observed["rayk_nixl_num_descriptors"] == values[:OBSERVED_PER_TICK]
    meter.flush()
    assert recorder.observed["rayk_nixl_num_descriptors"] == values


def test_a_folded_histogram_has_the_buckets_that_prometheus_counts() -> None:
    """Prometheus' own client, told of each value; borders themselves, values between and beyond them."""
    rng, recorder = random.Random(3), Recorder(model="m")
    meter, metric = Meter(recorder), METRICS["rayk_itl_seconds"]
    registry = CollectorRegistry()
    known = Histogram(metric.name, "-", buckets=metric.buckets, registry=registry)
    values = [*metric.buckets, 0.0, 99.0, *(rng.expovariate(30) for _ in range(500))]
    for value in values:
        known.observe(value)
    for at in range(0, len(values), 7):
        meter.observe_all(metric.name, values[at : at + 7])
        if at % 5 == 0:
            meter.flush()
    meter.flush()
    (counts,) = recorder.folded[metric.name].values()
    borders = [*map(str, metric.buckets), "+Inf"]
    expected = [registry.get_sample_value(f"{metric.name}_bucket", {"le": le}) for le in borders]
    assert list(itertools.accumulate(counts)) == expected
    assert recorder.folded_sums[metric.name] == pytest.approx(sum(values))


def test_folded_observations_cost_one_call_a_flush() -> None:
    recorder = Recorder(model="m")
    meter = Meter(recorder, Clock())
    for _ in range(100):
        meter.observe_all("rayk_itl_seconds", [0.004] * 32)
        meter.tick()
    assert recorder.num_calls == 0
    meter.flush()
    assert (recorder.num_calls, recorder.count("rayk_itl_seconds")) == (1, 3200)
    meter.flush()
    assert recorder.num_calls == 1, "nothing new"


def test_samplers_speak_before_each_flush() -> None:
    recorder, asked = Recorder(**KNOWN), []
    meter = Meter(recorder)
    meter.on_flush(lambda: (asked.append(1), meter.set("rayk_num_requests_waiting", len(asked)))[0])
    meter.flush()
    meter.flush()
    assert recorder.gauge("rayk_num_requests_waiting") == 2
