"""What a repeat achieved: percentiles, rates, goodput, and a queue by Little's law, of rows or of tables."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rayk.reports import load
from rayk.reports.achieved import by_repeat, mean_of, metrics_of, request_frame, with_counts
from rayk.types.rows import RequestRow
from rayk.types.slo import Slo
from tests.reports.synthetic import write_run

MS = 1_000_000


def answered(
    index: int, *, ttft_ms: float, gap_ms: float, tokens: int = 5, waits_ms: float = 0
) -> RequestRow:
    """A request that is due 100 ms after the one before."""
    due_ns = index * 100 * MS
    times = [due_ns + round((ttft_ms + gap_ms * n) * MS) for n in range(tokens)]
    return RequestRow(
        cell_id="c",
        repeat=0,
        request_id=str(index),
        prompt_index=index,
        prompt_token_ids=[1],
        output_token_ids=[1] * tokens,
        arrival_ns=due_ns,
        due_ns=due_ns,
        token_times_ns=times,
        stage_ns={"prefill_queue": round(waits_ms * MS), "prefill": 5 * MS, "queue": 2 * MS},
    )


def test_numbers_are_those_of_the_definition() -> None:
    rows = [answered(n, ttft_ms=10 + n, gap_ms=4 + n % 3) for n in range(11)]
    found = metrics_of(request_frame(rows), Slo(limits_ms={"ttft": 16.0, "tpot": 5.0}))
    assert found["ttft_ms_p50"] == pytest.approx(15)
    assert found["ttft_ms_p90"] == pytest.approx(np.percentile(np.arange(11) + 10, 90))
    assert found["tpot_ms_p50"] == pytest.approx(5)
    span_s = (1000 + 20 + 4 * 5) / 1e3  # the eleventh is due after 1 s, and takes 40 ms
    assert found["output_tokens_per_s"] == pytest.approx(55 / span_s)
    good = sum(10 + n <= 16 and 4 + n % 3 <= 5 for n in range(11))
    assert found["goodput_per_s"] == pytest.approx(good / span_s)
    assert found["good_share"] == pytest.approx(good / 11)


def test_the_queue_is_littles() -> None:
    """One request in two waits for room for 50 ms, and each for 2 ms before it is sent."""
    rows = [answered(n, ttft_ms=60, gap_ms=10, waits_ms=50 * (n % 2)) for n in range(10)]
    span_ms = 900 + 60 + 40
    assert metrics_of(request_frame(rows))["mean_waiting"] == pytest.approx((5 * 50 + 10 * 2) / span_ms)


def test_failed_requests_have_no_times_and_are_not_good() -> None:
    rows = [answered(n, ttft_ms=10, gap_ms=4) for n in range(4)]
    rows[3].error, rows[3].token_times_ns, rows[3].output_token_ids = "it died", [], []
    found = metrics_of(request_frame(rows))
    assert found["good_share"] == pytest.approx(0.75)
    assert found["ttft_ms_p90"] == pytest.approx(10)
    none = metrics_of(request_frame(rows[3:]))
    assert math.isnan(none["ttft_ms_p50"])
    assert none["good_share"] == 0


def test_gaps_between_tokens_can_be_limited_in_tables(tmp_path: Path) -> None:
    write_run(tmp_path, failures=False)
    result = load(tmp_path)
    requests = with_counts(result.requests)
    longest = requests["itl_ms"].map(lambda gaps: max(gaps, default=0.0)).max()
    one = requests[requests["cell_id"] == requests["cell_id"].iloc[0]]
    wide, narrow = (
        mean_of(by_repeat(one, Slo(limits_ms={"itl": limit})))["good_share"] for limit in (longest + 1, -1.0)
    )
    assert (wide, narrow) == (1.0, 0.0)
