"""Say what a repeat of a cell achieved: the numbers by which plans are chosen, and predictions judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.columns import request_record
from rayk.types.rows import RequestRow
from rayk.types.slo import Slo

WAITS = ("queue", "prefill_queue", "reserve", "decode_queue")
"""Stages in which a request waits for room: whoever is in one of them counts as queued."""
READ = (
    "repeat", "due_ms", "ttft_ms", "tpot_ms", "e2e_ms", "num_output_tokens", "error",
    *(f"stage_{stage}_ns" for stage in WAITS),
)  # fmt: skip
"""Columns that `metrics_of` reads; a limit of `itl` needs `itl_ms`, too."""
NS_PER_MS = 1e6
MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class Achievement:
    """A number that a repeat has, and how it is shown."""

    name: str
    title: str
    unit: str
    spec: str
    is_higher_better: bool = False


ACHIEVEMENTS = (
    Achievement("ttft_ms_p50", "TTFT p50", "ms", ",.1f"),
    Achievement("ttft_ms_p90", "TTFT p90", "ms", ",.1f"),
    Achievement("tpot_ms_p50", "TPOT p50", "ms", ",.2f"),
    Achievement("tpot_ms_p90", "TPOT p90", "ms", ",.2f"),
    Achievement("output_tokens_per_s", "throughput", "tokens/s", ",.1f", is_higher_better=True),
    Achievement("goodput_per_s", "goodput", "requests/s", ",.2f", is_higher_better=True),
    Achievement("mean_waiting", "queue", "requests", ",.2f"),
)


def metrics_of(requests: pd.DataFrame, slo: Slo | None = None) -> dict[str, float]:
    """Compute ACHIEVEMENTS of one repeat's rows of requests.parquet, and `good_share`; NaN where nothing
    tells one.

    Times are of requests that were answered; failed ones count as not good. Rates are per second from the
    first arrival to the last token. `mean_waiting` is the mean number of requests in WAITS at a time, by
    Little's law. Without limits every answer is good.
    """
    answered = requests[requests["error"].isna() & requests["e2e_ms"].notna()]
    found = {
        f"{name}_ms_p{percent}": _percentile(answered[f"{name}_ms"], percent)
        for name in ("ttft", "tpot")
        for percent in (50, 90)
    }
    began, ended = requests["due_ms"].min(), (answered["due_ms"] + answered["e2e_ms"]).max()
    span_s = (ended - began) / MS_PER_S if len(answered) and ended > began else float("nan")
    num_good = num_kept(answered, slo or Slo())
    waited_ms = sum(answered[f"stage_{stage}_ns"].fillna(0).sum() for stage in WAITS) / NS_PER_MS
    return found | {
        "output_tokens_per_s": float(answered["num_output_tokens"].sum() / span_s),
        "goodput_per_s": float(num_good / span_s),
        "mean_waiting": float(waited_ms / MS_PER_S / span_s),
        "good_share": num_good / len(requests) if len(requests) else float("nan"),
    }


def num_kept(answered: pd.DataFrame, slo: Slo) -> int:
    """Count the answers that keep every limit."""
    columns = ["num_output_tokens", *(f"{name}_ms" for name in slo.limits_ms)]
    rows = (dict(zip(columns, row, strict=True)) for row in answered[columns].itertuples(index=False))
    if "itl_ms" in columns:
        rows = (row | {"itl_ms": list(row["itl_ms"])} for row in rows)
    return sum(slo.is_kept(row) for row in rows)


def request_frame(rows: Iterable[RequestRow]) -> pd.DataFrame:
    """Make a table of `request_numbers`."""
    return pd.DataFrame([request_numbers(row) for row in rows], columns=list(READ))


def request_numbers(row: RequestRow) -> dict[str, Any]:
    """Make of a row what `metrics_of` reads, named as in requests.parquet: so much of each of many requests
    can be kept. Gaps between tokens are left out."""
    record = request_record(row) | {"num_output_tokens": len(row.output_token_ids)}
    return {name: record[name] for name in READ}


def with_counts(requests: pd.DataFrame) -> pd.DataFrame:
    """Add `num_output_tokens` to rows of requests.parquet."""
    return requests.assign(num_output_tokens=requests["output_token_ids"].map(len))


def by_repeat(requests: pd.DataFrame, slo: Slo | None = None) -> dict[int, dict[str, float]]:
    """Compute `metrics_of` of each repeat of one cell."""
    return {int(str(n)): metrics_of(rows, slo) for n, rows in requests.groupby("repeat", sort=True)}


def mean_of(repeats: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Average each number over repeats; NaN of the repeats that lack it are left out."""
    names = next(iter(repeats.values()), {})
    return {name: _mean([of[name] for of in repeats.values()]) for name in names}


def spread_of(repeats: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Compute half of each number's range over repeats."""
    names = next(iter(repeats.values()), {})
    return {name: _half_range([of[name] for of in repeats.values()]) for name in names}


def _mean(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _half_range(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return (max(known) - min(known)) / 2 if known else float("nan")


def _percentile(values: pd.Series[float], percent: float) -> float:
    known = values.dropna()
    return float(np.percentile(known, percent)) if len(known) else float("nan")
