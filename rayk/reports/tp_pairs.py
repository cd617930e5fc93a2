"""What a pair of tensor-parallel sizes costs: transfers of a request by prefill TP and decode TP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rayk.reports.environment import copy_gb_per_s
from rayk.reports.result import Result
from rayk.reports.stages import KEYS
from rayk.reports.verdicts import format_bytes

PLACES = ("prefill.tp", "decode.tp", "prefill.layout", "decode.layout")


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What rates are held against."""

    gb_per_s: float | None
    text: str
    """Where it comes from, or why there is none."""


def ceiling_of(environment: Mapping[str, Any]) -> Ceiling:
    """One core's memcpy, if the run measured it and its KV lay in host memory."""
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
        text=f"The ceiling is {measured:.1f} GB/s: one core's memcpy of 64 MiB, measured when the run began "
        "(environment.json). Small requests stay far below it: posting and waking up take longer than "
        "their bytes.",
    )


def pair_rows(result: Result) -> list[dict[str, Any]]:
    """A row per (prefill TP, decode TP, layouts) with transfers: of its requests the median ms from the first
    post to the last byte, mean descriptors posted and bytes, all bytes over all time in GB/s (10^9 bytes) and
    in percent of the ceiling; beside them num_requests and is_equal (TP). Cells that differ in other axes
    share a row."""
    if not set(PLACES).issubset(result.cells):
        return []
    requests = _by_request(result.transfers)
    placed = requests.merge(result.cells[["cell_id", *PLACES]], on="cell_id").dropna(subset=["decode.tp"])
    ceiling = ceiling_of(result.environment).gb_per_s
    rows: list[dict[str, Any]] = []
    for key, of_pair in placed.groupby(list(PLACES), sort=True):
        assert isinstance(key, tuple)
        prefill, decode = (int(float(str(size))) for size in key[:2])
        rate = float(of_pair["bytes"].sum() / of_pair["ms"].sum() / 1e6)
        rows.append(
            {
                "prefill_tp": prefill,
                "decode_tp": decode,
                "layouts": " → ".join(map(str, key[2:])),
                "is_equal": prefill == decode,
                "ms": float(of_pair["ms"].median()),
                "descriptors": float(of_pair["descriptors"].mean()),
                "bytes": float(of_pair["bytes"].mean()),
                "gb_per_s": rate,
                "percent": None if ceiling is None else 100 * rate / ceiling,
                "num_requests": len(of_pair),
            }
        )
    return rows


def _by_request(transfers: pd.DataFrame) -> pd.DataFrame:
    """KEYS, ms, descriptors and bytes of requests that moved bytes. Ranks move at the same time: the slowest
    pair of ranks is a request's time."""
    moved = transfers[transfers["bytes"].fillna(0).gt(0) & transfers["transfer_ms"].fillna(0).gt(0)]
    posted = moved["num_descriptors_merged"].fillna(moved["num_descriptors"])
    grouped = moved.assign(descriptors=posted, ms=moved["transfer_ms"]).groupby(KEYS, sort=False)
    return grouped.agg({"ms": "max", "descriptors": "sum", "bytes": "sum"}).reset_index()


FORMATS = (
    ("ms per request", "ms", "{:.2f} ms"),
    ("descriptors posted", "descriptors", "{:,.1f}"),
    ("bytes", "bytes", ""),
    ("rate", "gb_per_s", "{:.3g} GB/s"),
)
"""(title, key, format) of the tables of one pair of layouts."""


def pair_grids(result: Result) -> list[dict[str, Any]]:
    """Tables for the page, one set per pair of layouts: title, and per fact its title, columns (decode TP)
    and rows (label, cells: text, note, heat 0 to 1 of the largest; None where no such cell ran)."""
    rows = pair_rows(result)
    found = []
    for layouts in dict.fromkeys(row["layouts"] for row in rows):
        of = {(r["prefill_tp"], r["decode_tp"]): r for r in rows if r["layouts"] == layouts}
        prefills, decodes = (sorted({key[side] for key in of}) for side in (0, 1))
        facts = []
        for title, key, form in FORMATS:
            top = max(r[key] for r in of.values())
            table = [(f"P {p}", [_heat(of.get((p, d)), key, form, top) for d in decodes]) for p in prefills]
            facts.append({"title": title, "columns": [f"D {d}" for d in decodes], "rows": table})
        found.append({"title": layouts, "facts": facts})
    return found


def _heat(row: dict[str, Any] | None, key: str, form: str, top: float) -> dict[str, Any] | None:
    if row is None:
        return None
    text = form.format(row[key]) if form else format_bytes(round(row[key]))
    told = key == "gb_per_s" and row["percent"] is not None
    return {
        "text": text,
        "note": f"{row['percent']:.2g}% of ceiling" if told else "",
        "heat": round(row[key] / top, 3) if top > 0 else 0.0,
        "tip": f"P {row['prefill_tp']}, D {row['decode_tp']}, {row['layouts']}: of "
        f"{row['num_requests']} requests",
    }


def unequal_cost(result: Result) -> str:
    """One or two sentences: what requests of unequal TP sizes took beside those of equal ones, of the
    layouts that have both."""
    rows = pair_rows(result)
    if not rows:
        return "No KV was moved between engines, so unequal TP cost nothing here."
    both = [
        layouts
        for layouts in dict.fromkeys(r["layouts"] for r in rows)
        if len({r["is_equal"] for r in rows if r["layouts"] == layouts}) == 2
    ]
    if not both:
        which = "unequal" if any(r["is_equal"] for r in rows) else "equal"
        return f"Cannot be said from this run: with no layouts did it move KV at {which} TP sizes too."
    compared = [row for row in rows if row["layouts"] in both]
    equal, unequal = (_means([r for r in compared if r["is_equal"] is side]) for side in (True, False))
    worst = max((r for r in compared if not r["is_equal"]), key=lambda row: float(row["ms"]))
    whole = float(result.requests["e2e_ms"].median())
    share = (
        f", {100 * unequal['ms'] / whole:.1f}% of the median request's {whole:,.0f} ms" if whole > 0 else ""
    )
    return (
        f"Moving a request's KV took {unequal['ms']:.2f} ms at unequal TP sizes{share}, and "
        f"{equal['ms']:.2f} ms at equal ones ({_times(unequal['ms'], equal['ms'])}), with "
        f"{unequal['descriptors']:,.1f} descriptors instead of {equal['descriptors']:,.1f}, and "
        f"{format_bytes(round(unequal['bytes']))} instead of "
        f"{format_bytes(round(equal['bytes']))}. Slowest: P {worst['prefill_tp']}, "
        f"D {worst['decode_tp']}, {worst['layouts']}: {worst['ms']:.2f} ms."
    )


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each pair of sizes counts alike."""
    return {key: sum(row[key] for row in rows) / len(rows) for key in ("ms", "descriptors", "bytes")}


def _times(value: float, base: float) -> str:
    return f"{value / base:.2f} times" if base > 0 else "no ratio"
