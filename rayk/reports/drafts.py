"""Show what drafts came to: what was proposed, how much of it the model agreed to at each position, and how
much sooner tokens came than in the cell without drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rayk.reports.columns import CELL_FIELDS
from rayk.reports.intervals import median_interval
from rayk.reports.page import Column, Plot
from rayk.reports.paired import KEYS
from rayk.reports.plots import LEGEND, PALETTE, plain
from rayk.reports.result import Result
from rayk.reports.values import is_null

CONFIDENCE = 0.95
MAX_LINES = 24
"""Cells that the plot shows; the table has all."""
COLUMNS = (
    Column("cell_id", "cell_id"),
    Column("drafter", "drafter"),
    Column("drafts", "num_drafts", ",d"),
    Column("proposed", "num_drafted", ",d"),
    Column("accepted %", "accepted_percent", ".1f"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("by position, %", "positions"),
    Column("TPOT ms", "tpot_ms_p50", ".2f"),
    Column("undrafted TPOT ms", "undrafted_tpot_ms", ".2f"),
    Column("speed-up", "speedup", ".2f", beside="speedup_interval"),
)
NOTE = (
    "A draft is what is proposed to a request at once; the model computes it in one step with the token "
    "before it, and accepts as many of its first tokens as are those that it would have come to. Accepted: "
    "of all proposed tokens, and by position of those proposed there. Tokens per step: those after a "
    "request's first over the steps that gave them, drafts or not. Speed-up: time per output token of the "
    "same prompt in the cell without drafts over that with them, where all other axes are alike; the median "
    "over requests, in brackets its 95% interval, which takes them for independent."
)


def draft_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per cell whose engines were to draft."""
    cells = result.cells
    methods = [str(c) for c in cells if str(c).endswith("speculative.method")]
    if not methods or cells.empty:
        return []
    records = [{str(k): v for k, v in record.items()} for record in cells.to_dict(orient="records")]
    undrafted = {_others(record): record for record in records if not _drafter(record, methods)}
    return [
        {
            **record,
            "drafter": drafter,
            "accepted_percent": _percent(record["acceptance_rate"]),
            "positions": ", ".join(f"{share:.0f}" for share in shares_by_position(record)),
            **_against(record, undrafted.get(_others(record)), result.requests),
        }
        for record in records
        if (drafter := _drafter(record, methods)) and record["verdict"] != "UNSUPPORTED"
    ]


def _drafter(record: Mapping[str, Any], methods: list[str]) -> str:
    """Name the drafters of a cell: `ngram`, or by side where these differ; empty without any."""
    sides = {name.removesuffix("speculative.method").rstrip("."): record[name] for name in methods}
    told = {side: method for side, method in sides.items() if not is_null(method)}
    if set(told.values()) <= {"none"}:
        return ""
    own = {side: method for side, method in told.items() if side}
    if not own or set(own.values()) == {told.get("")}:
        return str(told[""])
    return ", ".join(f"{side or 'others'}: {method}" for side, method in told.items())


def _others(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """List the axes of a cell that say nothing of drafts, with their values."""
    axes = ((name, value) for name, value in record.items() if name not in CELL_FIELDS)
    return tuple(
        (name, "" if is_null(value) else str(value))
        for name, value in axes
        if "speculative" not in name.split(".")
    )


def shares_by_position(record: Mapping[str, Any]) -> list[float]:
    """Give the percent of the tokens proposed at each position that were accepted."""
    lists = (record["accepted_by_position"], record["drafted_by_position"])
    if any(counts is None or is_null(counts) for counts in lists):
        return []
    return [100 * accepted / proposed for accepted, proposed in zip(*lists, strict=True)]


def _percent(share: Any) -> float | None:
    return None if is_null(share) else 100 * float(share)


def _against(
    record: Mapping[str, Any], undrafted: Mapping[str, Any] | None, requests: pd.DataFrame
) -> dict[str, Any]:
    """Compare a cell's times per token with those of the same prompts without drafts."""
    empty = {"undrafted_tpot_ms": None, "speedup": None, "speedup_interval": ""}
    if undrafted is None:
        return empty
    columns = [*KEYS[1:], "tpot_ms"]
    sides = [requests[requests["cell_id"] == cell["cell_id"]][columns] for cell in (undrafted, record)]
    pairs = sides[0].merge(sides[1], on=KEYS[1:], suffixes=("/base", "/other"))
    pairs = pairs[(pairs["tpot_ms/base"] > 0) & (pairs["tpot_ms/other"] > 0)]
    if pairs.empty:
        return empty
    ratios = pairs["tpot_ms/base"] / pairs["tpot_ms/other"]
    interval = median_interval(ratios.tolist(), CONFIDENCE)
    return {
        "undrafted_tpot_ms": undrafted["tpot_ms_p50"],
        "speedup": float(ratios.median()),
        "speedup_interval": "{:.2f} to {:.2f}".format(*interval) if interval else "",
    }


def draft_plot(rows: list[dict[str, Any]]) -> list[Plot]:
    """Draw `drafts`: a line per cell of the share accepted at each position, counted from 1."""
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plain(row["cell_id"]),
            "x": list(range(1, 1 + len(shares))),
            "y": shares,
            "marker": {"color": PALETTE[number % len(PALETTE)]},
        }
        for number, row in enumerate(rows[:MAX_LINES])
        if (shares := shares_by_position(row))
    ]
    if not data:
        return []
    layout = {
        "height": 320,
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "position in the draft"}, "dtick": 1},
        "yaxis": {"title": {"text": "accepted, % of proposed"}, "range": [0, 100]},
    }
    return [Plot(id="drafts", data=data, layout=layout, is_wide=True)]
