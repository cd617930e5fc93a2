"""Compare two runs' requests in pairs: how much slower the other run is, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from rayk.reports.derived import moves_of
from rayk.reports.divided import divided_texts
from rayk.reports.intervals import MIN_VALUES, Sample, intervals, median_interval, usual_spread
from rayk.reports.moves import KEYS as IDS
from rayk.reports.result import Result

CONFIDENCE = 0.95  # of all intervals over all cells, or of benches, together
FALSE_RATE = 0.05  # expected share of false ones among marked changes
MARGIN = 0.05  # a change counts where the whole interval lies further from none
LARGE = 0.25  # a change of which that cannot be said is unsure where it is larger
KEYS = ["cell_id", "repeat", "prompt_index"]  # what names a request in both runs


@dataclass(frozen=True, kw_only=True)
class PairedMetric:
    """A number that both runs have of a request."""

    name: str
    unit: str
    column: str
    spec: str = ",.2f"
    is_rate: bool = False  # more of it is better
    is_count: bool = False  # nothing of it is chance: any difference is one

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


TIMES = tuple(
    PairedMetric(name=name, unit="ms", column=f"{name.lower()}_ms") for name in ("TTFT", "TPOT", "E2E")
)
# of moved requests: columns of `moves` with the prefix moved_
MOVES = (
    PairedMetric(name="transfer", unit="ms", column="moved_ms"),
    PairedMetric(name="rate", unit="GB/s", column="moved_gb_per_s", spec=",.3g", is_rate=True),
    PairedMetric(name="descriptors", unit="", column="moved_descriptors", spec=",.1f", is_count=True),
    PairedMetric(name="bytes", unit="", column="moved_bytes", spec=",.0f", is_count=True),
)
# of cells: tokens computed, summed over layers
COUNTS = (
    PairedMetric(name="token-layers", unit="", column="num_token_layers", spec=",.0f", is_count=True),
    PairedMetric(
        name="decode token-layers", unit="", column="decode.num_token_layers", spec=",.0f", is_count=True
    ),
)
_MOVED = [metric.column for metric in MOVES]
_KINDS = ["is_span", "is_merged"]

# levels of a Change: over all cells, of a pair of TP sizes, of one cell
WHOLE, SIZES, CELL = "whole", "sizes", "cell"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Relates a metric of the other run to the base's, over pairs of what both measured."""

    level: str
    subject: str  # a cell, a load, a pair of TP sizes, or `all cells`
    metric: PairedMetric
    num_pairs: int
    base: float
    other: float  # medians over the pairs, in the metric's unit
    # of other / base: median, or geometric mean where the interval is of it; of counts, of the sums
    ratio: float
    low: float | None
    high: float | None  # interval of `ratio`; None where the pairs are too few for any, and of counts
    num_unlike: int = 0  # pairs of a count that differ

    @property
    def verdict(self) -> str:
        """Judge the change: regression, improvement, unsure, no change seen, or too few pairs; of a count
        regression, improvement, changed or the same."""
        low, high = (self.ratio, self.ratio) if self.metric.is_count else (self.low, self.high)
        is_large = max(self.ratio, 1 / self.ratio if self.ratio else math.inf) > 1 + LARGE
        if low is None or high is None:
            return "unsure" if is_large else "too few pairs"
        is_more, is_less = low > 1 + MARGIN, high < 1 / (1 + MARGIN)
        if not is_more and not is_less:
            if self.metric.is_count:
                return "changed" if self.num_unlike else "the same"
            return "unsure" if is_large else "no change seen"
        return "improvement" if is_more == self.metric.is_rate else "regression"


@dataclass(frozen=True, kw_only=True)
class Paired:
    level: str
    subject: str
    metric: PairedMetric
    pairs: pd.DataFrame  # base and other, a row per pair; cell_id where they are of several cells

    @property
    def ratios(self) -> pd.Series:
        return self.pairs["other"] / self.pairs["base"]


def changes(base: Result, other: Result) -> list[Change]:
    """Compare over all cells (a pair is a cell's median), by TP sizes and by cell (a pair is a request).
    Intervals over all cells hold together with CONFIDENCE; of marked changes of TP sizes and of cells
    FALSE_RATE may be false."""
    pairs, counts = _pairs(base, other), _counts(base, other)
    whole = [*_whole(pairs), *_measured(WHOLE, "all cells", counts, COUNTS)]
    cells = list(_by_cell(pairs, (*TIMES, *(metric for metric in MOVES if metric.is_count))))
    cells += [paired for metric in COUNTS for paired in _by_cell(counts, [metric])]
    sizes = list(_by_sizes(pairs, base.cells))
    spreads = _spreads(pairs)
    return [*changes_of(whole, 1 - CONFIDENCE), *_discovered(sizes, spreads), *_discovered(cells, spreads)]


def changes_of(found: Sequence[Paired], error: float) -> list[Change]:
    count = sum(not paired.metric.is_count for paired in found)
    return [_change(paired, 1 - error / max(1, count)) for paired in found]


def _spreads(pairs: pd.DataFrame) -> dict[str, float]:
    """Estimate per column how far cells scatter by chance (standard deviation of log ratios): a cell's
    requests share a few seconds of the machine."""
    found = {}
    for metric in (*TIMES, *MOVES):
        table = known(pairs, metric.column, "cell_id")
        logs = table.assign(log=np.log((table["other"] / table["base"]).to_numpy(float)))
        found[metric.column] = usual_spread(logs.groupby("cell_id")["log"].mean().to_list())
    return found


def _discovered(found: Sequence[Paired], spreads: Mapping[str, float]) -> list[Change]:
    samples = {
        i: Sample(
            logs=np.log(paired.ratios.to_numpy(float)).tolist(),
            shared=spreads[paired.metric.column] ** 2 / paired.pairs["cell_id"].nunique(),
        )
        for i, paired in enumerate(found)
        if not paired.metric.is_count and len(paired.pairs) >= MIN_VALUES
    }
    ends = dict(zip(samples, intervals(list(samples.values()), math.log1p(MARGIN), FALSE_RATE), strict=True))
    told = []
    for i, paired in enumerate(found):
        change = replace(_change(paired, CONFIDENCE), low=None, high=None)
        if i in samples:
            low, high = (math.exp(end) for end in ends[i])
            change = replace(change, ratio=math.exp(samples[i].mean), low=low, high=high)
        told.append(change)
    return told


def _pairs(base: Result, other: Result) -> pd.DataFrame:
    columns = [metric.column for metric in (*TIMES, *MOVES)]
    sides = []
    for result in (base, other):
        moved = moves_of(result)
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
    renamed = {f"{column}/base": "base", f"{column}/other": "other"}
    table = pairs[[*keys, *renamed]].rename(columns=renamed)
    return table[table["base"].gt(0) & table["other"].gt(0)]


def _measured(
    level: str, subject: str, rows: pd.DataFrame, metrics: Sequence[PairedMetric]
) -> Iterator[Paired]:
    """Yield the pairs of each metric that both runs measured."""
    for metric in metrics:
        pairs = known(rows, metric.column, "cell_id")
        if len(pairs):
            yield Paired(level=level, subject=subject, metric=metric, pairs=pairs)


def _whole(pairs: pd.DataFrame) -> Iterator[Paired]:
    for paired in _measured(WHOLE, "all cells", pairs, (*TIMES, *MOVES)):
        yield replace(paired, pairs=paired.pairs.groupby("cell_id", sort=False)[["base", "other"]].median())


def _by_sizes(pairs: pd.DataFrame, cells: pd.DataFrame) -> Iterator[Paired]:
    """Compare transfers alone: TP sizes, and what else divides KV, are what they depend on."""
    axes = ["prefill.tp", "decode.tp"]
    if not set(axes).issubset(cells):
        return
    sizes = cells[["cell_id", *axes]].assign(divided=divided_texts(cells)).dropna()
    placed = pairs.merge(sizes, on="cell_id")
    for key, rows in placed.groupby([*axes, "divided"], sort=True):
        assert isinstance(key, tuple)
        subject = "P {:.0f}, D {:.0f}".format(*(float(str(size)) for size in key[:2]))
        yield from _measured(SIZES, f"{subject}: {key[2]}" if key[2] else subject, rows, MOVES)


def _by_cell(pairs: pd.DataFrame, metrics: Sequence[PairedMetric]) -> Iterator[Paired]:
    for cell_id, rows in pairs.groupby("cell_id", sort=False):
        yield from _measured(CELL, str(cell_id), rows, metrics)


def _counts(base: Result, other: Result) -> pd.DataFrame:
    """Join the cells' COUNTS: a pair is a cell."""
    columns = ["cell_id", *(metric.column for metric in COUNTS)]
    sides = [result.cells.reindex(columns=columns) for result in (base, other)]
    return sides[0].merge(sides[1], on="cell_id", suffixes=("/base", "/other"))


def _change(paired: Paired, confidence: float) -> Change:
    pairs, ratios = paired.pairs, paired.ratios
    is_count = paired.metric.is_count
    interval = None if is_count else median_interval(ratios.tolist(), confidence)
    ratio = pairs["other"].sum() / pairs["base"].sum() if is_count else ratios.median()
    return Change(
        level=paired.level,
        subject=paired.subject,
        metric=paired.metric,
        num_pairs=len(pairs),
        base=float(pairs["base"].median()),
        other=float(pairs["other"].median()),
        ratio=float(ratio),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        num_unlike=int((pairs["base"] != pairs["other"]).sum()) if is_count else 0,
    )
