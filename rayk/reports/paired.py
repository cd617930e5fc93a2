"""Two runs' requests in pairs: how much slower the other one is, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from rayk.reports.moves import KEYS as IDS
from rayk.reports.moves import moves
from rayk.reports.result import Result

CONFIDENCE = 0.95
"""Of all intervals of one comparison together."""
MARGIN = 0.05
"""A change counts where the whole interval lies further from none."""
KEYS = ["cell_id", "repeat", "prompt_index"]
"""What names a request in both runs."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that both runs have of a request."""

    name: str
    unit: str
    column: str
    spec: str = ",.2f"
    is_rate: bool = False
    """More of it is better."""

    @property
    def title(self) -> str:
        """E.g. `TTFT, ms`."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


TIMES = tuple(Metric(name=name, unit="ms", column=f"{name.lower()}_ms") for name in ("TTFT", "TPOT", "E2E"))
MOVES = (
    Metric(name="transfer", unit="ms", column="moved_ms"),
    Metric(name="rate", unit="GB/s", column="moved_gb_per_s", spec=",.3g", is_rate=True),
    Metric(name="descriptors", unit="", column="moved_descriptors", spec=",.1f"),
)
"""Of requests whose KV was moved; columns of `moves`, less their prefix."""
_MOVED = [metric.column for metric in MOVES]
_KINDS = ["is_span", "is_merged"]

WHOLE, SIZES, CELL = "whole", "sizes", "cell"
"""Levels: over all cells, over those of one pair of TP sizes, of one cell."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a metric of the other run relates to the base's, over pairs of what both measured."""

    level: str
    subject: str
    """A cell, a load, a pair of TP sizes, or `all cells`."""
    metric: Metric
    num_pairs: int
    base: float
    other: float
    """Medians over the pairs, in the metric's unit."""
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
        is_more, is_less = self.low > 1 + MARGIN, self.high < 1 / (1 + MARGIN)
        if not is_more and not is_less:
            return "no change seen"
        return "improvement" if is_more == self.metric.is_rate else "regression"


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


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Pairs that one interval is made of."""

    level: str
    subject: str
    metric: Metric
    pairs: pd.DataFrame
    """base and other, a row per pair."""


def changes(base: Result, other: Result) -> list[Change]:
    """Over all cells both runs have (a pair is a cell, by the median of its requests), by pairs of TP sizes
    and of every cell (a pair is a request). The intervals of one level have a third of what may go wrong, so
    that all hold together with CONFIDENCE."""
    pairs = _pairs(base, other)
    levels = (list(_whole(pairs)), list(_by_sizes(pairs, base.cells)), list(_by_cell(pairs)))
    return [change for level in levels for change in changes_of(level, (1 - CONFIDENCE) / len(levels))]


def changes_of(found: Sequence[Paired], error: float) -> list[Change]:
    """A Change of each; with probability `error` at most, some interval misses its median."""
    return [_change(paired, 1 - error / len(found)) for paired in found]


def _pairs(base: Result, other: Result) -> pd.DataFrame:
    """KEYS and each metric's column with `/base` and `/other`, of requests of both runs."""
    columns = [metric.column for metric in (*TIMES, *MOVES)]
    sides = []
    for result in (base, other):
        moved = moves(result.requests, result.transfers)
        moved = moved.rename(
            columns={metric.column.removeprefix("moved_"): metric.column for metric in MOVES}
        )
        requests = result.requests.merge(moved[[*IDS, *_KINDS, *_MOVED]], on=IDS, how="left")
        sides.append(requests[[*KEYS, *columns, *_KINDS]].drop_duplicates(KEYS))
    pairs = sides[0].merge(sides[1], on=KEYS, suffixes=("/base", "/other"))
    # An older rayk measured something else.
    alike = [pairs[f"{kind}/base"].eq(pairs[f"{kind}/other"]) for kind in _KINDS]
    for column in _MOVED:
        pairs[f"{column}/base"] = pairs[f"{column}/base"].where(alike[0] & alike[1])
    return pairs


def known(pairs: pd.DataFrame, column: str, *keys: str) -> pd.DataFrame:
    """`keys`, base and other of the pairs that both runs measured."""
    renamed = {f"{column}/base": "base", f"{column}/other": "other"}
    table = pairs[[*keys, *renamed]].rename(columns=renamed)
    return table[table["base"].gt(0) & table["other"].gt(0)]


def _whole(pairs: pd.DataFrame) -> Iterator[Paired]:
    for metric in (*TIMES, *MOVES):
        of_all = known(pairs, metric.column, "cell_id")
        if len(of_all):
            middle = of_all.groupby("cell_id", sort=False)[["base", "other"]].median()
            yield Paired(level=WHOLE, subject="all cells", metric=metric, pairs=middle)


def _by_sizes(pairs: pd.DataFrame, cells: pd.DataFrame) -> Iterator[Paired]:
    """Of transfers alone: TP sizes are what they depend on."""
    axes = ["prefill.tp", "decode.tp"]
    if not set(axes).issubset(cells):
        return
    placed = pairs.merge(cells[["cell_id", *axes]].dropna(), on="cell_id")
    for key, rows in placed.groupby(axes, sort=True):
        assert isinstance(key, tuple)
        subject = "P {:.0f}, D {:.0f}".format(*map(float, map(str, key)))
        for metric in MOVES:
            of_sizes = known(rows, metric.column)
            if len(of_sizes):
                yield Paired(level=SIZES, subject=subject, metric=metric, pairs=of_sizes)


def _by_cell(pairs: pd.DataFrame) -> Iterator[Paired]:
    for cell_id, rows in pairs.groupby("cell_id", sort=False):
        for metric in TIMES:
            of_cell = known(rows, metric.column)
            if len(of_cell):
                yield Paired(level=CELL, subject=str(cell_id), metric=metric, pairs=of_cell)


def _change(paired: Paired, confidence: float) -> Change:
    pairs = paired.pairs
    ratios = (pairs["other"] / pairs["base"]).tolist()
    interval = median_interval(ratios, confidence)
    return Change(
        level=paired.level,
        subject=paired.subject,
        metric=paired.metric,
        num_pairs=len(ratios),
        base=float(pairs["base"].median()),
        other=float(pairs["other"].median()),
        ratio=float(pd.Series(ratios).median()),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
    )
