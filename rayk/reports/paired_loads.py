"""Compare two benches: the same requests in pairs, and estimates by their own intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.load_fields import METRICS as LATENCIES
from rayk.reports.load_fields import STATISTICS
from rayk.reports.paired import CONFIDENCE, KEYS, TIMES, Change, Paired, PairedMetric, changes_of, known
from rayk.reports.result import Result
from rayk.reports.values import is_null

LOAD, ESTIMATE = "load", "estimate"  # levels of a Change: batches of a load's requests, an estimate of a load
METRICS = (*TIMES, PairedMetric(name="longest ITL", unit="ms", column="longest_itl_ms"))
MIN_BATCH = 5
NUM_BATCHES = 20  # neighbouring requests wait in the same queues: intervals are made of batches of them


def load_changes(base: Result, other: Result) -> list[Change]:
    """Compare loads that both benches sent with the same prompts, INVALID ones aside: a pair is a batch of
    requests in order of arrival. All intervals hold together with CONFIDENCE."""
    found = list(_paired(base, other))
    return changes_of(found, 1 - CONFIDENCE) if found else []


def _paired(base: Result, other: Result) -> Iterator[Paired]:
    trusted = set(_trusted(base)) & set(_trusted(other))
    pairs = _answered(base).merge(_answered(other), on=KEYS, suffixes=("/base", "/other"))
    for cell_id, rows in pairs.groupby("cell_id", sort=False):
        if cell_id not in trusted or not _same_prompts(rows):
            continue
        in_order = rows.sort_values("prompt_index")
        for metric in METRICS:
            batches = _batches(known(in_order, metric.column))
            if len(batches):
                yield Paired(level=LOAD, subject=str(cell_id), metric=metric, pairs=batches)


def _trusted(result: Result) -> list[Any]:
    return result.cells.loc[result.cells["verdict"] != "INVALID", "cell_id"].tolist()


def _answered(result: Result) -> pd.DataFrame:
    requests = result.requests
    rows = requests[(requests["phase"] == "measured") & (requests["outcome"] == "ok")]
    longest = [max(gaps) if gaps is not None and len(gaps) else math.nan for gaps in rows["itl_ms"]]
    told = rows.assign(longest_itl_ms=longest)
    return told[[*KEYS, "prompt_token_ids", "num_prompt_tokens", *(metric.column for metric in METRICS)]]


def _same_prompts(pairs: pd.DataFrame) -> bool:
    ids, counts = (
        [pairs[f"{column}/{side}"] for side in ("base", "other")]
        for column in ("prompt_token_ids", "num_prompt_tokens")
    )
    if ids[0].notna().all() and ids[1].notna().all():
        return all(list(a) == list(b) for a, b in zip(*ids, strict=True))
    return bool((counts[0] == counts[1]).all())


def _batches(pairs: pd.DataFrame) -> pd.DataFrame:
    """Average over NUM_BATCHES batches, or as few as make neighbours' ratios uncorrelated."""
    count = min(NUM_BATCHES, len(pairs) // MIN_BATCH)
    table = _means(pairs, count)
    while count > MIN_BATCH and _is_correlated(np.log((table["other"] / table["base"]).to_numpy(float))):
        count //= 2
        table = _means(pairs, count)
    return table


def _means(pairs: pd.DataFrame, count: int) -> pd.DataFrame:
    batch = np.arange(len(pairs)) * count // max(1, len(pairs))
    return pairs.groupby(batch)[["base", "other"]].mean() if count else pairs.iloc[:0]


def _is_correlated(values: np.ndarray[Any, Any]) -> bool:
    """Test whether neighbours are correlated by more than a standard error, 1 / sqrt(n)."""
    rest = values - values.mean()
    total = float(rest @ rest)
    return total > 0 and float(rest[1:] @ rest[:-1]) / total > 1 / math.sqrt(len(values))


def estimate_changes(base: Result, other: Result) -> list[Change]:
    """Compare the estimates of loads that both benches sent, INVALID ones aside, whatever the requests. The
    interval is what the two 95% intervals leave; each on its own holds with 90% at least."""
    trusted = set(_trusted(base)) & set(_trusted(other))
    sides = [{cell["cell_id"]: cell for cell in r.cells.to_dict(orient="records")} for r in (base, other)]
    return [
        change
        for cell_id in sides[0]
        if cell_id in trusted
        for metric in LATENCIES
        for statistic in STATISTICS
        if (change := _estimate(cell_id, metric, statistic, [side[cell_id] for side in sides])) is not None
    ]


def _estimate(cell_id: str, metric: str, statistic: str, cells: list[dict[Any, Any]]) -> Change | None:
    name = f"{metric}_ms_{statistic}"
    ends = [_ends(cell, name) for cell in cells]
    if any(value is None or not value > 0 for side in ends for value in side):
        return None
    (base, low, high), (other, other_low, other_high) = ((float(v or 0) for v in side) for side in ends)
    return Change(
        level=ESTIMATE,
        subject=cell_id,
        metric=PairedMetric(name=f"{metric.upper()} {statistic}", unit="ms", column=name),
        num_pairs=0,
        base=base,
        other=other,
        ratio=other / base,
        low=other_low / high,
        high=other_high / low,
    )


def _ends(cell: Mapping[Any, Any], name: str) -> list[float | None]:
    values = [cell.get(f"{name}{end}") for end in ("", "_low", "_high")]
    return [None if value is None or is_null(value) else float(value) for value in values]
