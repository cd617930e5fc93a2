"""Measure what a pair of TP sizes costs: transfers of a request by prefill TP and decode TP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rayk.reports.derived import once_per_result
from rayk.reports.divided import divided_texts
from rayk.reports.environment import copy_gb_per_s
from rayk.reports.intervals import median_interval
from rayk.reports.moves import moves
from rayk.reports.result import Result
from rayk.reports.side_by_side import KIND
from rayk.reports.values import format_bytes, format_rate, smallest_rate

CONFIDENCE = 0.95  # each interval stands alone
PLACES = ("prefill.tp", "decode.tp", "prefill.layout", "decode.layout")
DIVIDED = "divided"  # the column that says what else than TP divides the KV (`divided.divided`)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    gb_per_s: float | None
    text: str  # where it comes from, or why there is none


def ceiling_of(environment: Mapping[str, Any]) -> Ceiling:
    """Take one core's memcpy, if the run measured it and its KV lay in host memory."""
    measured = copy_gb_per_s(environment)
    if measured is None:
        return Ceiling(gb_per_s=None, text="The run has no measured ceiling (environment.json: ceiling).")
    devices = environment.get("devices", {})
    if isinstance(devices, Mapping) and devices.get("gpus"):
        return Ceiling(
            gb_per_s=None,
            text="The machine has GPUs; the ceiling in environment.json is a copy in host memory, so rates "
            "are not held against it.",
        )
    return Ceiling(
        gb_per_s=measured,
        text=f"The ceiling is {measured:.1f} GB/s, measured when the run began: "
        f"{environment['ceiling'].get('what', 'a copy by one core')}. Ranks that move at the same time can "
        "pass it; small requests stay far below it: posting and waking up take longer than their bytes.",
    )


def pair_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per (prefill TP, decode TP, layouts, mode) from `moves`: median ms with its interval (None
    of too few), median rank_ms, mean descriptors and bytes, and all bytes over all time, also in percent of
    the ceiling. Cells that differ in other axes share a row, but not those of vLLM's engines and of rayk's,
    nor those that divide tokens or layers in different ways, which `layouts` says."""
    placed = placed_moves(result)
    ceiling = ceiling_of(result.environment).gb_per_s
    rows: list[dict[str, Any]] = []
    for key, of_pair in placed.groupby([*PLACES, DIVIDED, "is_push", KIND], sort=True):
        assert isinstance(key, tuple)
        prefill, decode = (int(float(str(size))) for size in key[:2])
        rate = float(of_pair["bytes"].sum() / of_pair["moving_ms"].sum() / 1e6)
        low, high = median_interval(of_pair["ms"].tolist(), CONFIDENCE) or (None, None)
        rows.append(
            {
                "prefill_tp": prefill,
                "decode_tp": decode,
                "layouts": layouts_name(*key[2:5], is_push=bool(key[5]), kind=key[6]),
                "is_equal": prefill == decode,
                "ms": float(of_pair["ms"].median()),
                "low_ms": low,
                "high_ms": high,
                "rank_ms": float(of_pair["rank_ms"].median()),
                "descriptors": float(of_pair["descriptors"].mean()),
                "bytes": float(of_pair["bytes"].mean()),
                "gb_per_s": rate,
                "percent": None if ceiling is None else 100 * rate / ceiling,
                "num_requests": len(of_pair),
                "is_span": bool(of_pair["is_span"].all()),
                "is_merged": bool(of_pair["is_merged"].all()),
            }
        )
    return rows


@once_per_result
def placed_moves(result: Result) -> pd.DataFrame:
    """Add PLACES, DIVIDED and the kind of engines to `moves`."""
    requests, transfers, cells = result.requests, result.transfers, result.cells
    if not set(PLACES).issubset(cells):
        return moves(requests, transfers).assign(**dict.fromkeys((*PLACES, DIVIDED, KIND), None)).head(0)
    cells = cells.assign(**{DIVIDED: divided_texts(cells)})
    if KIND not in cells:
        cells = cells.assign(**{KIND: "rayk"})
    # vLLM tells less of its transfers, which takes nothing from what is known of rayk's.
    kind_of = transfers["cell_id"].map(cells.set_index("cell_id")[KIND])
    parts = [moves(requests, transfers[kind_of == kind]) for kind in cells[KIND].unique()]
    found = pd.concat(parts, ignore_index=True)
    return found.merge(cells[["cell_id", *PLACES, DIVIDED, KIND]], on="cell_id").dropna(subset=["decode.tp"])


PUSH, VLLM = ", push", ", vLLM"  # end the name of layouts between which KV was pushed, or of vLLM's engines


def layouts_name(
    prefill: object, decode: object, divided: object = "", *, is_push: bool, kind: object = "rayk"
) -> str:
    """Name what a grid of TP sizes is of, e.g. `BHLNC → LBHNC, D DCP 2, push`."""
    name = f"{prefill} → {decode}" + (f", {divided}" if divided else "")
    return name + (PUSH if is_push else "") + (VLLM if kind == "vllm" else "")


OLDER = "an older rayk wrote it"
VLLMS = "vLLM tells no more"


def _facts(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """List (title, key, format) of the tables of one pair of layouts."""
    spans, merged = (all(row[fact] for row in rows) for fact in ("is_span", "is_merged"))
    is_push = any(PUSH in row["layouts"] for row in rows)
    why = VLLMS if rows[0]["layouts"].endswith(VLLM) else OLDER
    ms = "ms per request" if spans else f"ms of its slowest pair of ranks ({why})"
    posted = "descriptors posted" if merged else f"descriptors before merging ({why})"
    return [
        ("ms after the prompt was computed" if is_push else ms, "ms", "{:.2f} ms"),
        (posted, "descriptors", "{:,.1f}"),
        ("bytes per request", "bytes", ""),
        ("rate per request, all ranks", "gb_per_s", ""),
    ]


def pair_grids(result: Result) -> list[dict[str, Any]]:
    """Make the page's grids, one set per pair of layouts and mode; a cell's heat is its share of the
    largest."""
    rows = pair_rows(result)
    found = []
    for layouts in dict.fromkeys(row["layouts"] for row in rows):
        of_layouts = [row for row in rows if row["layouts"] == layouts]
        of = {(r["prefill_tp"], r["decode_tp"]): r for r in of_layouts}
        prefills, decodes = (sorted({key[side] for key in of}) for side in (0, 1))
        facts = []
        for title, key, form in _facts(of_layouts):
            values = [float(r[key]) for r in of.values()]
            table = [
                (f"P {p}", [_heat(of.get((p, d)), key, form, values) for d in decodes]) for p in prefills
            ]
            facts.append({"title": title, "columns": [f"D {d}" for d in decodes], "rows": table})
        found.append({"title": layouts, "facts": facts})
    return found


def _heat(row: dict[str, Any] | None, key: str, form: str, of_table: list[float]) -> dict[str, Any] | None:
    if row is None:
        return None
    top = max(of_table)
    text = form.format(row[key]) if form else format_bytes(round(row[key]))
    note = ""
    if key == "gb_per_s":
        text = format_rate(row[key], smallest_rate(of_table))
    if key == "gb_per_s" and row["percent"] is not None:
        note = f"{row['percent']:.2g}% of ceiling"
    if key == "ms":
        note = "too few for an interval"
        if row["low_ms"] is not None:
            note = f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"
    return {
        "text": text,
        "note": note,
        "heat": round(row[key] / top, 3) if top > 0 else 0.0,
        "tip": f"P {row['prefill_tp']}, D {row['decode_tp']}, {row['layouts']}: of "
        f"{row['num_requests']} requests"
        + (
            f"; median, 95% interval below; the slowest rank alone: {row['rank_ms']:.2f} ms"
            if key == "ms"
            else ""
        ),
    }
