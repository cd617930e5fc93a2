"""Show what drafts came to: what was proposed, how much of it the model agreed to at each position, and how
much sooner tokens came than in the cell without drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rayk.reports.columns import CELL_FIELDS
from rayk.reports.intervals import MIN_VALUES, median_interval, student_t
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
    Column("aggregated %", "aggregated_percent", ".1f"),
    Column("difference", "acceptance_difference", "+.1f", beside="acceptance_interval"),
    Column("by position, %", "positions"),
    Column("TPOT ms", "tpot_ms_p50", ".2f"),
    Column("undrafted TPOT ms", "undrafted_tpot_ms", ".2f"),
    Column("speed-up", "speedup", ".2f", beside="speedup_interval"),
)
NOTE = (
    "A draft is what is proposed to a request at once; the model computes it in one step with the token "
    "before it, and accepts as many of its first tokens as are those that it would have come to. Accepted: "
    "of all proposed tokens, and by position of those proposed there. Tokens per step: those after a "
    "request's first over the steps that gave them, drafts or not. Aggregated: accepted in the cell with the "
    "same drafts where no request is handed over; the difference is the mean over prompts, in brackets its "
    "95% interval: one without 0 says that hand-overs change what is accepted. Speed-up: time per output "
    "token of the same prompt in the cell without drafts over that with them, where all other axes are "
    "alike; the median over requests, in brackets its 95% interval, which takes them for independent."
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
            **_beside_aggregated(record, records, result.requests),
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


def _beside_aggregated(
    record: Mapping[str, Any], records: Sequence[Mapping[str, Any]], requests: pd.DataFrame
) -> dict[str, Any]:
    """Compare what is accepted after hand-overs with what is without, prompt by prompt, in percent."""
    empty = {"aggregated_percent": None, "acceptance_difference": None, "acceptance_interval": ""}
    other = _aggregated(record, records)
    if other is None or is_null(other["acceptance_rate"]):
        return empty
    found = empty | {"aggregated_percent": _percent(other["acceptance_rate"])}
    columns = [*KEYS[1:], "acceptance_rate"]
    sides = [requests[requests["cell_id"] == cell["cell_id"]][columns].dropna() for cell in (other, record)]
    pairs = sides[0].merge(sides[1], on=KEYS[1:], suffixes=("/base", "/other"))
    if pairs.empty:
        return found
    gaps = 100 * (pairs["acceptance_rate/other"] - pairs["acceptance_rate/base"])
    found["acceptance_difference"] = mean = float(gaps.mean())
    if len(gaps) >= MIN_VALUES:
        half = student_t((1 + CONFIDENCE) / 2, len(gaps) - 1) * float(gaps.std()) / len(gaps) ** 0.5
        found["acceptance_interval"] = f"{mean - half:+.1f} to {mean + half:+.1f}"
    return found


def _aggregated(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Find the cell without hand-overs whose shared axes, those of drafts included, are a cell's own: of
    several, one of the TP size that decodes here."""
    if record.get("mode") != "disaggregated":
        return None
    alike = [
        other
        for other in records
        if other.get("mode") == "aggregated" and _shared(other) == _shared(record) and is_drafted(other)
    ]
    return min(alike, key=lambda other: other.get("prefill.tp") != record.get("decode.tp"), default=None)


def _shared(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the axes of a cell that are of no side, and no faults."""
    sides = ("prefill.", "decode.", "transfer.")
    return {
        name: str(value)
        for name, value in record.items()
        if name not in CELL_FIELDS and name not in ("mode", "faults") and not name.startswith(sides)
    }


def is_drafted(record: Mapping[str, Any]) -> bool:
    """Tell whether anything was proposed in a cell."""
    return not is_null(record["acceptance_rate"])


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
