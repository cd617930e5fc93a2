"""Verdict matrices, prefill TP by decode TP, one per setting of everything else that varies. Each model gets
its own rows. Where hardly two cells share a grid, each model has one grid: TP settings by everything else."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.columns import CELL_FIELDS
from rayk.reports.divided import is_division
from rayk.reports.values import axis_label, format_rate, format_value, is_null, parsed, smallest_rate
from rayk.reports.verdicts import known_wrong_bytes, tone
from rayk.types.model_names import short_name

# what a matrix cell says
SHORT = {
    "PASS": "pass",
    "NEAR_TIE": "near tie",
    "UNSUPPORTED": "n/a",
    "KV_MISMATCH": "KV wrong",
    "NOT_FINITE": "not finite",
    "TRANSFER_ERROR": "transfer",
    "ENGINE_ERROR": "engine",
    "TIMEOUT": "timeout",
    "DRAFT_MISMATCH": "drafts",
    "TOKEN_MISMATCH": "tokens",
    "OUT_OF_PACE": "out of pace",
    "PREDICTED": "predicted",
}
# axes that place a cell in a grid
PLACES = {"mode", "prefill.tp", "decode.tp", "prefill.layout", "decode.layout"}


def verdict_grids(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Make a grid per combination of the axes that vary beside TP; layouts are always named, as is what else
    divides KV. A grid has title, corner, columns (labels) and rows (label, cells); a cell has verdict, tone,
    text, note and tip, or is None."""
    if cells.empty or not PLACES.issubset(cells):
        return []
    cells = known_wrong_bytes(cells)
    axes = _grouping_axes(cells)
    grids = _split(cells, axes)
    rows: list[str] = []
    if 2 * len(grids) > len(cells):
        if "model" in cells:
            return _grids_by_model(cells, axes)
        rows = [axis for axis in axes if _is_structured(cells[axis])]
        axes = [axis for axis in axes if axis not in rows]
        grids = _split(cells, axes)
    return [_make_grid(records, axes, rows) for records in grids]


def _split(cells: pd.DataFrame, axes: list[str]) -> list[list[dict[Any, Any]]]:
    parts: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
    for record in cells.to_dict(orient="records"):
        key = (record["mode"], *(_plain(record[axis]) for axis in axes))
        parts.setdefault(key, []).append(record)
    return list(parts.values())


def _is_structured(column: pd.Series[Any]) -> bool:
    return any(isinstance(parsed(value), list | dict) for value in column)


def _grids_by_model(cells: pd.DataFrame, axes: list[str]) -> list[dict[str, Any]]:
    usual = {axis: cells[axis].map(_plain).mode(dropna=False)[0] for axis in axes}
    settings = sorted({_tp_setting(r) for r in cells.to_dict(orient="records")})
    grids = []
    for model, part in cells.groupby("model", sort=False):
        at: dict[str, dict[tuple[int, ...], dict[Any, Any]]] = {}
        for record in sorted(part.to_dict(orient="records"), key=_tp_setting):
            # What is planted has no usual value: a cell always says it, and how it divides KV beside TP.
            differing = [
                axis
                for axis in axes
                if axis == "faults" or is_division(axis, record[axis]) or _plain(record[axis]) != usual[axis]
            ]
            label = _title(record, differing, record["mode"] == "aggregated")
            at.setdefault(label, {})[_tp_setting(record)] = record
        columns = [s for s in settings if any(s in row for row in at.values())]
        slow = smallest_rate(part["transfer_gb_per_s"])
        grids.append(
            {
                "title": short_name(str(model)),
                "corner": "TP",
                "columns": [" → ".join(map(str, s[1:])) for s in columns],
                "rows": [
                    (label, [_grid_cell(row.get(s), slow) for s in columns]) for label, row in at.items()
                ],
            }
        )
    return grids


def _tp_setting(record: dict[Any, Any]) -> tuple[int, ...]:
    """Count the sides, then list each side's TP: aggregated cells sort first."""
    sides = ("prefill.tp",) if record["mode"] == "aggregated" else ("prefill.tp", "decode.tp")
    return len(sides), *(int(record[side]) for side in sides)


def axis_columns(cells: pd.DataFrame) -> list[str]:
    return [str(c) for c in cells.columns if c not in CELL_FIELDS and c != "cell_id"]


def _grouping_axes(cells: pd.DataFrame) -> list[str]:
    """Name the layouts, whatever varies among cells of one mode, and what divides KV beside TP."""
    axes = []
    for axis in axis_columns(cells):
        if axis in ("mode", "model", "prefill.tp", "decode.tp"):
            continue
        varies = any(len(set(map(_plain, part[axis]))) > 1 for _, part in cells.groupby("mode"))
        is_named = axis in ("prefill.layout", "decode.layout") or any(
            is_division(axis, v) for v in cells[axis]
        )
        if varies or is_named:
            axes.append(axis)
    return axes


def _plain(value: Any) -> Any:
    return None if is_null(value) else value


def _make_grid(records: list[dict[Any, Any]], axes: list[str], row_axes: list[str]) -> dict[str, Any]:
    first = records[0]
    aggregated = first["mode"] == "aggregated"
    # Rows: models, `row_axes` and, of those handed over, prefill TP. Columns: the other TP.
    column = "prefill.tp" if aggregated else "decode.tp"
    columns = sorted({int(r[column]) for r in records})
    at: dict[str, dict[int, dict[Any, Any]]] = {}
    for record in sorted(records, key=lambda r: 0 if aggregated else int(r["prefill.tp"])):
        at.setdefault(_row_label(record, aggregated, row_axes), {})[int(record[column])] = record
    slow = smallest_rate(record["transfer_gb_per_s"] for record in records)
    return {
        "title": _title(first, axes, aggregated),
        "corner": "" if aggregated else "TP",
        "columns": [f"TP {tp}" if aggregated else f"D {tp}" for tp in columns],
        "rows": [(label, [_grid_cell(row.get(tp), slow) for tp in columns]) for label, row in at.items()],
    }


def _row_label(record: dict[Any, Any], aggregated: bool, row_axes: list[str]) -> str:
    parts = [short_name(record["model"])] if "model" in record else []
    if not aggregated:
        parts.append(f"P {int(record['prefill.tp'])}")
    return ", ".join(parts + _labels(record, row_axes))


def _labels(record: dict[Any, Any], axes: list[str]) -> list[str]:
    return [axis_label(axis, record[axis]) for axis in axes if _plain(record[axis]) is not None]


def _title(record: dict[Any, Any], axes: list[str], aggregated: bool) -> str:
    layouts = ("prefill.layout", "decode.layout")
    if aggregated:
        parts = [f"aggregated, layout {record['prefill.layout']}"]
    else:
        parts = [f"{record['prefill.layout']} → {record['decode.layout']}"]
    return ", ".join(parts + _labels(record, [a for a in axes if a not in layouts]))


def _grid_cell(record: dict[Any, Any] | None, smallest: float) -> dict[str, str] | None:
    if record is None:
        return None
    ttft = format_value(record["ttft_ms_p50"], ".0f")
    note = format_rate(record["transfer_gb_per_s"], smallest) or (f"{ttft} ms" if ttft else "")
    verdict = str(record["verdict"])
    return {
        "verdict": verdict,
        "tone": tone(record),
        "text": SHORT.get(verdict, verdict),
        "note": note,
        "tip": _tip(record),
    }


WHERE_ANY = ("num_cached_tokens", "held_bytes")  # told where they are above 0


def _tip(record: dict[Any, Any]) -> str:
    facts = (
        ("requests", "num_requests", "d"),
        ("requests with wrong tokens", "num_token_mismatches", "d"),
        ("KV bytes compared", "num_kv_bytes_checked", ",d"),
        ("KV bytes wrong", "num_kv_bytes_mismatched", ",d"),
        ("KV bytes moved", "transfer_bytes", ",d"),
        ("prompt tokens found in caches", "num_cached_tokens", ",d"),
        ("KV held already, MiB", "held_bytes", "MiB"),
        ("descriptors", "num_descriptors", ",d"),
        ("smallest kernel block, tokens", "min_cut_kernel_block_size", "d"),
        ("token-layers", "num_token_layers", ",d"),
        ("layers with fast prefill", "num_fast_prefill_layers", "d"),
        ("GB/s", "transfer_gb_per_s", ".3g"),
        ("TTFT p50, ms", "ttft_ms_p50", ".1f"),
        ("TPOT p50, ms", "tpot_ms_p50", ".1f"),
    )
    lines = [f"{record['cell_id']}: {record['verdict']}"]
    if record["expected_verdict"] not in (None, "PASS"):
        lines.append(f"expected: {record['expected_verdict']}")
    if record["reason"]:
        lines.append(str(record["reason"]))
    for label, column, spec in facts:
        text = format_value(record[column], spec)
        if text and not (text == "0" and column in WHERE_ANY):
            lines.append(f"{label}: {text}")
    return "\n".join(lines)
