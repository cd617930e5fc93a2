"""Measure what unequal TP sizes cost: each transfer is held beside that of the same prompt to the same decode
TP from a prefill engine of that size. Cells whose sides divide tokens or layers in different ways are left
out: at equal TP their ranks do not match either."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from rayk.reports.derived import once_per_result
from rayk.reports.divided import is_alike
from rayk.reports.grids import axis_columns
from rayk.reports.intervals import median_interval
from rayk.reports.moves import KEYS
from rayk.reports.result import Result
from rayk.reports.side_by_side import KIND
from rayk.reports.tp_pairs import CONFIDENCE, OLDER, PLACES, layouts_name, placed_moves
from rayk.reports.values import format_bytes

# the time of a transfer depends on how many ranks read, so the decode TP is among them
ALIKE = ["settings", "layouts", "repeat", "decode.tp"]
FACTS = ["ms", "rank_ms", "descriptors", "bytes"]
SIDES = ("P < D", "P > D")


@dataclass(frozen=True, kw_only=True)
class CostSide:
    """Sums up what requests took where the prefill TP was below the decode TP, or above it: medians over
    units. A unit is a decode TP with its layouts and settings in a repeat, since prompts of a cell share a
    few seconds of the machine."""

    name: str
    num_pairs: int  # pairs of requests with the same prompt and repeat
    num_units: int
    ms: float
    equal_ms: float
    more_ms: float
    interval: tuple[float, float] | None  # for more_ms; None where units are too few
    times: float  # the ratio, medians likewise
    means: pd.Series[float]  # FACTS, and with `_e` those of the equal ones

    @property
    def is_told(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def _moves(result: Result) -> pd.DataFrame:
    """List moves between engines that differ in TP at most, of one kind: rayk's, if the run has any."""
    cells = result.cells
    alike = cells["cell_id"][[is_alike(cell) for cell in cells.to_dict(orient="records")]]
    moved = placed_moves(result)
    moved = moved[moved["cell_id"].isin(alike)]
    is_rayks = moved[KIND] == "rayk"
    return moved[is_rayks] if is_rayks.any() else moved


@once_per_result
def unequal_pairs(result: Result) -> pd.DataFrame:
    """Make a row per prompt, prefill TP and ALIKE of unequal sizes: side, FACTS, and with `_e` those of the
    same prompt at equal sizes."""
    moved = _moves(result)
    if moved.empty:
        return pd.DataFrame()
    prompts = result.requests[[*KEYS, "prompt_index"]].drop_duplicates(KEYS)
    settings = _settings(result.cells)
    moved = moved.merge(prompts, on=KEYS).merge(settings, on="cell_id")
    names = zip(moved["prefill.layout"], moved["decode.layout"], moved["is_push"], strict=True)
    moved = moved.assign(
        layouts=[layouts_name(p, d, is_push=bool(push)) for p, d, push in names],
        **{size: moved[size].astype("float64") for size in ("prefill.tp", "decode.tp")},
    )
    key = [*ALIKE, "prompt_index"]
    means = moved.groupby([*key, "prefill.tp"])[FACTS].mean().reset_index()
    is_equal = means["prefill.tp"] == means["decode.tp"]
    equal = means[is_equal].drop(columns="prefill.tp")
    found = means[~is_equal].merge(equal, on=key, suffixes=("", "_e"))
    below = found["prefill.tp"] < found["decode.tp"]
    return found.assign(side=below.map({True: SIDES[0], False: SIDES[1]}))


def _settings(cells: pd.DataFrame) -> pd.DataFrame:
    """Write as one text all axes but PLACES: compared cells differ in these only."""
    axes = sorted(set(axis_columns(cells)) - set(PLACES))
    texts = [repr(record) for record in cells[axes].to_dict(orient="records")]
    return pd.DataFrame({"cell_id": cells["cell_id"], "settings": texts})


def cost_sides(pairs: pd.DataFrame) -> list[CostSide]:
    sides = []
    for name in SIDES:
        of_side = pairs[pairs["side"] == name] if len(pairs) else pairs
        if of_side.empty:
            continue
        compared = of_side.assign(more=of_side["ms"] - of_side["ms_e"], times=of_side["ms"] / of_side["ms_e"])
        units = compared.groupby(ALIKE)[["ms", "ms_e", "more", "times"]].median()
        ms, equal_ms, more, times = (float(value) for value in units.median())
        sides.append(
            CostSide(
                name=name,
                num_pairs=len(of_side),
                num_units=len(units),
                ms=ms,
                equal_ms=equal_ms,
                more_ms=more,
                interval=median_interval(units["more"].tolist(), CONFIDENCE),
                times=times,
                means=of_side[[*FACTS, *(f"{fact}_e" for fact in FACTS)]].mean(),
            )
        )
    return sides


def unequal_cost(result: Result) -> str:
    """Answer in one or two sentences; `cost_table` has the numbers."""
    moved = _moves(result)
    if moved.empty and len(placed_moves(result)):
        return "Cannot be said from this run: its sides divide tokens or layers in different ways."
    if moved.empty:
        return "No KV was moved between engines, so unequal TP cost nothing here."
    sides = cost_sides(unequal_pairs(result))
    if not sides:
        which = "unequal" if (moved["prefill.tp"] == moved["decode.tp"]).any() else "equal"
        return (
            "Cannot be said from this run: to no decode TP did it move KV both from its own size and from "
            f"another, all else alike (it lacks {which} TP sizes for that)."
        )
    told = [side for side in sides if side.is_told]
    against = "Each request is held against the same prompt's at the same decode TP with P = D."
    if not told:
        few = all(side.interval is None for side in sides)
        why = ": too few repeats and decode sizes" if few else ""
        seen = ", ".join(f"{_amount(side)} where {side.name}" for side in sides)
        return f"Nothing that can be told from chance{why} ({seen}). {against}"
    first = "; ".join(f"{_amount(side)} per request where {side.name}{_share(side, result)}" for side in told)
    rest = "".join(
        f"; nothing that can be told from chance where {side.name}" for side in sides if not side.is_told
    )
    return f"{first[0].upper()}{first[1:]}{rest}. {against}"


def is_cost_told(result: Result) -> bool:
    """Say whether something was moved, and repeats are enough to tell it from chance."""
    return any(side.interval is not None for side in cost_sides(unequal_pairs(result)))


def _amount(side: CostSide) -> str:
    """Say how much it took, e.g. `2.1 ms (1.80 times) more`."""
    word = "more" if side.more_ms >= 0 else "less"
    return f"{abs(side.more_ms):.2f} ms ({side.times:.2f} times) {word}"


def _share(side: CostSide, result: Result) -> str:
    whole = float(result.requests["e2e_ms"].median())
    return f", {100 * abs(side.more_ms) / whole:.1f}% of the median request" if whole > 0 else ""


def cost_table(result: Result) -> list[list[str]]:
    """Make a row of titles, then one per fact with a column per side."""
    sides = cost_sides(unequal_pairs(result))
    if not sides:
        return []
    moved = _moves(result)
    is_merged, is_span = bool(moved["is_merged"].all()), bool(moved["is_span"].all())
    # Writes of a push begin while the prompt is computed: nobody waits for what a rank takes alone.
    has_ranks = is_span and not bool(moved["is_push"].any())
    rows = [
        ["pairs (units)", *(f"{side.num_pairs:,} ({side.num_units:,})" for side in sides)],
        [
            "ms per request" if is_span else f"ms of the slowest pair of ranks ({OLDER})",
            *(f"{side.ms:.2f}" for side in sides),
        ],
        ["ms at P = D", *(f"{side.equal_ms:.2f}" for side in sides)],
        ["more, ms", *(f"{side.more_ms:+.2f}" for side in sides)],
        ["its 95% interval", *(_interval(side) for side in sides)],
        ["times", *(f"{side.times:.2f}" for side in sides)],
    ]
    facts = [("slowest rank alone, ms", "rank_ms", ".2f")] if has_ranks else []
    posted = "descriptors" if is_merged else f"descriptors before merging ({OLDER})"
    facts += [(posted, "descriptors", ",.1f"), ("bytes", "bytes", "bytes")]
    for title, name, spec in facts:
        rows.append([f"{title} (at P = D)", *(_both(side, name, spec) for side in sides)])
    return [["", *(side.name for side in sides)], *rows]


def _interval(side: CostSide) -> str:
    if side.interval is None:
        return "too few units"
    low, high = side.interval
    return f"{low:+.2f} to {high:+.2f}"


def _both(side: CostSide, name: str, spec: str) -> str:
    here, equal = (
        format_bytes(round(side.means[key])) if spec == "bytes" else format(side.means[key], spec)
        for key in (name, f"{name}_e")
    )
    return f"{here} ({equal})"


COST_NOTE = (
    "Medians over units: a decode TP with its layouts and other settings, in a repeat. Descriptors, bytes "
    "and the slowest rank alone are means per request; what a request took beyond that rank is ranks that "
    "began later."
)
