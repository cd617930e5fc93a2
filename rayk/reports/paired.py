"""Times of two runs, request by request: how much slower the other one is, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from rayk.reports.result import Result

METRICS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms"))
"""(title, column of requests.parquet); more is worse."""
KEYS = ["cell_id", "repeat", "prompt_index"]
CONFIDENCE = 0.95
"""Of all intervals of one comparison together."""
MARGIN = 0.05
"""A change counts where the whole interval lies further from none."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a metric of the other run relates to the base's, over pairs of what both measured."""

    subject: str
    """A cell, or `all cells`."""
    metric: str
    num_pairs: int
    base_ms: float
    other_ms: float
    """Medians over the pairs."""
    ratio: float
    """Median of other / base."""
    low: float | None
    high: float | None
    """Interval of `ratio`; None where the pairs are too few for any."""

    @property
    def verdict(self) -> str:
        """regression, improvement, no change seen, or too few pairs."""
        if self.low is None or self.high is None:
            return "too few pairs"
        if self.low > 1 + MARGIN:
            return "regression"
        return "improvement" if self.high < 1 / (1 + MARGIN) else "no change seen"


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Order statistics between which the median of what `values` were drawn from lies with at least this
    confidence, whatever the distribution (sign test); None where there are too few."""
    count = len(values)
    outside, rank = 0.0, 0
    # P(fewer than `rank` + 1 of `count` lie below the median), on each side.
    while rank < count // 2:
        more = outside + math.comb(count, rank) * 0.5**count
        if 2 * more > 1 - confidence:
            break
        outside, rank = more, rank + 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def changes(base: Result, other: Result) -> list[Change]:
    """Per metric one Change over all cells both runs have (a pair is a cell, by the median of its requests),
    then those of every cell (a pair is a request). The intervals hold together with CONFIDENCE: over all
    cells half of what may go wrong, over single cells the other half."""
    pairs = _pairs(base, other)
    measured = [(title, column) for title, column in METRICS if len(_known(pairs, column))]
    found = []
    for title, column in measured:
        known = _known(pairs, column)
        middle = known.groupby("cell_id", sort=False)[["base", "other"]].median()
        found.append(_change("all cells", title, middle, 1 - (1 - CONFIDENCE) / 2 / len(measured)))
    num_intervals = sum(_known(pairs, column)["cell_id"].nunique() for _, column in measured)
    for cell_id in dict.fromkeys(pairs["cell_id"]):
        of_cell = pairs[pairs["cell_id"] == cell_id]
        for title, column in measured:
            known = _known(of_cell, column)
            if len(known):
                confidence = 1 - (1 - CONFIDENCE) / 2 / num_intervals
                found.append(_change(str(cell_id), title, known, confidence))
    return found


def _pairs(base: Result, other: Result) -> pd.DataFrame:
    """KEYS and each column of METRICS with `/base` and `/other`, of requests of both runs."""
    columns = [*KEYS, *(column for _, column in METRICS)]
    left, right = (r.requests[columns].drop_duplicates(KEYS) for r in (base, other))
    return left.merge(right, on=KEYS, suffixes=("/base", "/other"))


def _known(pairs: pd.DataFrame, column: str) -> pd.DataFrame:
    """cell_id, base and other of the pairs that both runs measured."""
    renamed = {f"{column}/base": "base", f"{column}/other": "other"}
    known = pairs[["cell_id", *renamed]].rename(columns=renamed)
    return known[known["base"].gt(0) & known["other"].gt(0)]


def _change(subject: str, metric: str, pairs: pd.DataFrame, confidence: float) -> Change:
    ratios = (pairs["other"] / pairs["base"]).tolist()
    interval = median_interval(ratios, confidence)
    return Change(
        subject=subject,
        metric=metric,
        num_pairs=len(ratios),
        base_ms=float(pairs["base"].median()),
        other_ms=float(pairs["other"].median()),
        ratio=float(pd.Series(ratios).median()),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
    )


HEAD = ["", "metric", "run", "pairs", "base ms", "other ms", "change", "interval", "finding"]
"""Columns of `change_row`."""
NOTE = (
    "Requests of one cell, repeat and prompt are a pair; over all cells a pair is a cell, by its median. The "
    "change is the median of the ratios less one; its interval needs no assumption about their distribution "
    f"(sign test), and all intervals of a run hold together with {CONFIDENCE:.0%}. A regression is a change "
    f"of which the whole interval is beyond {MARGIN:.0%}. Requests of a cell share a few seconds of the "
    "machine: one cell alone is a hint, all cells are the finding."
)


def change_row(change: Change, run: str) -> list[str]:
    """Texts of a change under HEAD."""
    ends = (
        ""
        if change.low is None or change.high is None
        else f"{_percent(change.low)} to {_percent(change.high)}"
    )
    times = (f"{change.base_ms:,.2f}", f"{change.other_ms:,.2f}")
    found = [_percent(change.ratio), ends, change.verdict]
    return [change.subject, change.metric, run, str(change.num_pairs), *times, *found]


def tones(change: Change) -> list[str]:
    """Colours of the columns after the first."""
    tone = {"regression": "unmet", "improvement": "met"}.get(change.verdict, "")
    return [""] * (len(HEAD) - 2) + [tone]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"
