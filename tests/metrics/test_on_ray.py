"""Metrics of a real cluster as Prometheus would scrape them, against the rows of the same run."""

from __future__ import annotations

import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rayk.metrics import LABEL_VALUES, METRICS, MetricKind
from tests.markers import nixl, ray, thorough
from tests.pd import wait_until

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]

RAYS_OWN = {"WorkerId", "NodeAddress", "SessionName", "Version", "Component", "JobId"}
"""Labels that Ray adds, besides those of its telemetry (otel_...)."""
NAME = "scraped"
"""Of the model's folder, which no other test's metrics carry."""

AWAITED = (
    "rayk_generation_tokens_total",
    "rayk_e2e_seconds_count",
    "rayk_steps_total",
    "rayk_step_seconds_count_total",
)


def scrape() -> list[Sample]:
    """All samples of rayk's metrics on all nodes."""
    import ray as ray_

    found = []
    for node in ray_.nodes():
        if not node["Alive"]:
            continue
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        found += [s for f in families for s in f.samples if s.name.startswith("ray_rayk_")]
    return [s for s in found if s.labels.get("model", NAME) == NAME]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(s.value for s in samples if s.name == f"ray_{name}" and wanted <= s.labels.items())


@pytest.fixture(scope="module")
def run(
    metered_address: str, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, list[Sample]]]:
    """The outcome of a disaggregated cell, TP 2 to 1, and what was scraped when it was all told; the workers
    still live."""
    import ray as ray_

    from rayk.actors import launch
    from rayk.models.families import load_config
    from rayk.specs import load_spec, plan_cells

    model = tmp_path_factory.mktemp("model") / NAME
    shutil.copytree(checkpoint("qwen3"), model)
    spec = {
        "name": "metrics",
        "model": str(model),
        "device": "cpu",
        "prompts": {"random": {"count": 4, "input_tokens": [5, 37, 300, 37], "seed": 0}},
        "sampling": {"max_tokens": 12, "ignore_eos": True},
        "speculative": {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1},
        "matrix": [{"prefill.tp": 2, "decode.tp": 1}],
        "checks": ["tokens", "kv_bytes"],
    }
    with launch.connect(metered_address):
        loaded = load_spec(spec)
        planned = plan_cells(loaded, {str(model): load_config(str(model))})
        (cell,), _ = launch.fit_cells([c for c, _ in planned])
        coordinator = launch.start_coordinator("rayk/coordinator/metrics", keep_workers=True)
        samples: list[Sample] = []

        def all_told() -> bool:
            time.sleep(0.2)
            samples[:] = scrape()
            # Ray may collect in the midst of a report, which begins with steps and ends with their times.
            tokens, told, steps, timed = (total(samples, name) for name in AWAITED)
            return (tokens, told, timed) == (num_tokens, len(outcome.requests), steps)

        try:
            running = coordinator.run_cell.remote(cell, planned[0][1], 0, capture=False)
            outcome = ray_.get(running, timeout=200)
            num_tokens = sum(len(r.output_token_ids) for r in outcome.requests)

            def awaited() -> str:
                return str({name: total(samples, name) for name in AWAITED})

            wait_until(all_told, 60.0, awaited)
            time.sleep(2.5)  # What was collected in the midst of a report is collected again within a second.
            wait_until(all_told, 60.0, awaited)
            yield outcome, samples
            ray_.get(coordinator.shutdown.remote(), timeout=60)
        finally:
            ray_.kill(coordinator)


def test_counters_are_the_sums_of_the_rows(run: tuple[Any, list[Sample]]) -> None:
    outcome, samples = run
    assert outcome.errors == []
    rows, transfers = outcome.requests, outcome.transfers
    num_prompt = sum(r.num_prompt_tokens for r in rows)
    of = {"engine": "decode0", "rank": "0", "role": "decode"}
    assert total(samples, "rayk_nixl_bytes_total", **of) == sum(t.bytes for t in transfers) > 0
    assert total(samples, "rayk_nixl_bytes_total") == sum(t.bytes for t in transfers), "nobody else read"
    assert total(samples, "rayk_nixl_descriptors_total", **of) == sum(t.num_descriptors for t in transfers)
    assert total(samples, "rayk_nixl_transfers_total", mode="pull", **of) == len(rows)
    assert total(samples, "rayk_kv_bytes_checked_total", **of) == outcome.num_kv_bytes_checked > 0
    assert total(samples, "rayk_kv_mismatches_total") == 0
    assert total(samples, "rayk_prompt_tokens_total", engine="prefill0", rank="0") == num_prompt
    assert total(samples, "rayk_requests_total", engine="prefill0", finish_reason="handed_over") == len(rows)
    assert total(samples, "rayk_requests_total", engine="decode0", finish_reason="length") == len(rows)
    assert total(samples, "rayk_requests_total") == 2 * len(rows), "and of nothing else"
    assert total(samples, "rayk_request_outcomes_total", finish_reason="length") == len(rows)
    assert total(samples, "rayk_request_outcomes_total") == len(rows), "once, wherever it ran"


def test_drafts_are_those_of_the_rows(run: tuple[Any, list[Sample]]) -> None:
    outcome, samples = run
    of = {"engine": "decode0", "rank": "0", "role": "decode"}
    drafted, accepted = (
        [sum(at) for at in zip_longest(*(getattr(r, name) for r in outcome.requests), fillvalue=0)]
        for name in ("drafted_by_position", "accepted_by_position")
    )
    name = "rayk_spec_decode_num"
    assert total(samples, f"{name}_drafts_total", **of) == drafted[0] > 0
    assert total(samples, f"{name}_draft_tokens_total", **of) == sum(drafted)
    assert total(samples, f"{name}_accepted_tokens_total", **of) == sum(accepted)
    for position, number in enumerate(accepted):
        told = total(samples, f"{name}_accepted_tokens_per_pos_total", position=str(position), **of)
        assert told == number
    assert total(samples, f"{name}_drafts_total") == drafted[0], (
        "where prompts are computed nothing is proposed"
    )


def test_what_did_not_happen_stands_at_zero(run: tuple[Any, list[Sample]]) -> None:
    """Rates and alerts see the first of what is counted only where its counter was there before."""
    _, samples = run
    told = {
        (s.name.removeprefix("ray_"), s.labels.get("engine"), s.labels.get("rank")): s.value for s in samples
    }
    for rank in "01":
        assert told["rayk_nixl_num_kv_expired_reqs_total", "prefill0", rank] == 0
    assert told["rayk_kv_mismatches_total", "decode0", "0"] == 0
    errors = [s.value for s in samples if s.labels.get("finish_reason") == "error"]
    assert errors == [0.0] * 3, "of both engines, and of whole requests"
    lost = {s.labels["engine"]: s for s in samples if s.name == "ray_rayk_engines_lost_total"}
    assert {name: (s.labels["role"], s.value) for name, s in lost.items()} == {
        "prefill0": ("prefill", 0.0),
        "decode0": ("decode", 0.0),
    }


def test_histograms_count_each_request_once(run: tuple[Any, list[Sample]]) -> None:
    outcome, samples = run
    num_gaps = sum(len(r.output_token_ids) - 1 for r in outcome.requests)
    assert total(samples, "rayk_itl_seconds_count_total", model=NAME) == num_gaps
    for name in ("ttft", "tpot", "e2e"):
        assert total(samples, f"rayk_{name}_seconds_count", model=NAME) == len(outcome.requests)
    assert total(samples, "rayk_nixl_xfer_time_seconds_count") == len(outcome.requests)
    assert total(samples, "rayk_itl_seconds_bucket_total", le="+Inf") == num_gaps
    gaps = [b - a for r in outcome.requests for a, b in pairwise(r.token_times_ns)]
    assert total(samples, "rayk_itl_seconds_sum_total") == pytest.approx(sum(gaps) / 1e9)
    for border in METRICS["rayk_itl_seconds"].buckets:
        below = total(samples, "rayk_itl_seconds_bucket_total", le=str(border))
        assert below == sum(gap / 1e9 <= border for gap in gaps), border
    assert 0 < total(samples, "rayk_step_seconds_count_total") == total(samples, "rayk_steps_total")
    # Each request's time lies in the bucket that it is counted in.
    times = sorted((r.token_times_ns[-1] - r.arrival_ns) / 1e9 for r in outcome.requests)
    for border in METRICS["rayk_e2e_seconds"].buckets:
        below = sum(
            s.value
            for s in samples
            if s.name == "ray_rayk_e2e_seconds_bucket" and float(s.labels["le"]) == border
        )
        assert below == sum(t <= border for t in times), border


def test_both_ranks_tell_of_their_steps_and_of_waiting_for_each_other(run: tuple[Any, list[Sample]]) -> None:
    outcome, samples = run
    of = [{"engine": "prefill0", "rank": rank} for rank in "01"]
    steps = [total(samples, "rayk_steps_total", phase="prefill", **rank) for rank in of]
    assert steps[0] == steps[1] > 0
    waits = [total(samples, "rayk_collective_seconds_total", **rank) for rank in of]
    models = [total(samples, "rayk_model_seconds_total", **rank) for rank in of]
    assert all(0 < wait < model for wait, model in zip(waits, models, strict=True))
    flops = [total(samples, "rayk_estimated_flops_per_gpu_total", **rank) for rank in of]
    # All is split evenly but the odd vocabulary: one row of 64 more, once per prompt's last token.
    assert abs(flops[1] - flops[0]) == 2 * 64 * len(outcome.requests)
    assert flops[0] > 0


def test_a_gauge_is_told_while_it_is_repeated_and_then_forgotten(run: tuple[Any, list[Sample]]) -> None:
    """By a process that lives, which is this one: Ray keeps what an engine said last for two seconds, and may
    not have been looked at by then."""
    from rayk.actors.ray_metrics import make_meter

    name, place = "rayk_engine_rank_info", {"stage": "0", "tp_rank": "1", "dcp_rank": "0"}
    meter = make_meter(NAME, engine="lives", role="prefill", rank="1")
    meter.set(name, 1, **place)

    def is_told() -> bool:
        meter.flush()
        time.sleep(0.2)
        return total(scrape(), name, engine="lives", rank="1", **place) == 1

    wait_until(is_told, 60.0, lambda: "the gauge of a process that repeats it")
    meter.forget(name, **place)
    wait_until(
        lambda: total(scrape(), name, engine="lives") == 0, 60.0, lambda: "a gauge that nobody repeats"
    )


def test_every_scraped_label_is_in_the_table_and_bounded(run: tuple[Any, list[Sample]]) -> None:
    outcome, samples = run
    ids = {r.request_id for r in outcome.requests}
    seen = set()
    for sample in samples:
        name = sample.name.removeprefix("ray_")
        is_bucket = name.endswith(("_bucket", "_bucket_total"))
        if name not in METRICS:
            name = re.sub("_(bucket|sum|count)(_total)?$", "", name)
            assert sample.name.endswith("_total") == METRICS[name].is_folded
        metric = METRICS[name]
        seen.add(name)
        labels = {k: v for k, v in sample.labels.items() if k not in RAYS_OWN and k[:5] != "otel_"}
        expected = {*metric.labels, "le"} if is_bucket else {*metric.labels}
        assert set(labels) == expected, sample
        assert not ids & set(labels.values())
        assert all(v in LABEL_VALUES[k] for k, v in labels.items() if k in LABEL_VALUES), sample
    counters = {n for n, m in METRICS.items() if m.kind is MetricKind.COUNTER}
    assert len(seen & counters) > 15
