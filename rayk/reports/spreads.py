"""Figures over all cells: how latencies are spread, and what throughput costs in speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.result import Result

PALETTE = ("#3b7dd8", "#d9822b", "#2f9e77", "#b65fcf", "#c94f4f", "#7a8b2e", "#1aa3b8", "#8c6d5a", "#d6589f")
"""Colours of series, on light and dark alike."""
SPREADS = (("ttft", "TTFT, ms"), ("itl", "ITL, ms"), ("e2e", "E2E, ms"))
"""(metric, title) of the curves."""
MAX_STEPS = 200
"""Points of a curve: of more values, as many quantiles."""


def spread_plots(result: Result) -> list[dict[str, Any]]:
    """A figure per metric that has values, `spread-<metric>`: for each pair of TP sizes the share of requests
    (of ITL: of gaps) that took at most so long, in percent."""
    labels = _tp_labels(result.cells)
    requests = result.requests.assign(sizes=result.requests["cell_id"].map(labels))
    plots = []
    for metric, _ in SPREADS:
        data = []
        for number, (sizes, rows) in enumerate(requests.groupby("sizes", sort=True)):
            values = _values(rows[f"{metric}_ms"])
            if len(values):
                data.append(_curve(str(sizes), values, PALETTE[number % len(PALETTE)]))
        if data:
            plots.append({"id": f"spread-{metric}", "data": data, "layout": _layout(metric, len(data))})
    return plots


def _tp_labels(cells: pd.DataFrame) -> dict[Any, str]:
    """cell id -> `P 2, D 1`, or `TP 2` where one engine does it all."""
    if not {"prefill.tp", "decode.tp"}.issubset(cells):
        return dict.fromkeys(cells["cell_id"], "all")
    labels = {}
    for cell in cells.to_dict(orient="records"):
        prefill, decode = cell["prefill.tp"], cell["decode.tp"]
        labels[cell["cell_id"]] = (
            f"TP {prefill:.0f}" if pd.isna(decode) else f"P {prefill:.0f}, D {decode:.0f}"
        )
    return labels


def _values(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """The numbers of a column of numbers or of lists of them."""
    known = column.dropna()
    if len(known) and isinstance(known.iloc[0], np.ndarray | list):
        known = pd.Series(np.concatenate([np.asarray(v, float) for v in known]))
    return np.sort(known.to_numpy(float))


def _curve(name: str, values: np.ndarray[Any, Any], colour: str) -> dict[str, Any]:
    """The empirical distribution: of few values a step each, of many quantiles."""
    count = len(values)
    ranks = np.unique(np.linspace(1, count, min(count, MAX_STEPS)).round().astype(int))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [float(v) for v in values[ranks - 1].round(3)],
        "y": [float(v) for v in (100 * ranks / count).round(2)],
        "line": {"color": colour, "width": 1.8, "shape": "hv"},
        "hovertemplate": f"{name}: %{{y:.0f}}% within %{{x:.2f}} ms<extra></extra>",
    }


def _layout(metric: str, num_curves: int) -> dict[str, Any]:
    return {
        "height": 330,
        "showlegend": num_curves > 1,
        "legend": {"orientation": "h", "y": -0.22},
        "xaxis": {"title": {"text": "ms"}, "type": "log"},
        "yaxis": {"title": {"text": "% of gaps" if metric == "itl" else "% of requests"}, "range": [0, 101]},
    }


def num_workers(cell: Mapping[Any, Any]) -> int | None:
    """Ranks of a cell's engines; None where its axes do not tell."""
    total = 0.0
    for side in ("prefill", "decode"):
        tp, engines = (cell.get(f"{side}.{name}") for name in ("tp", "num_engines"))
        if tp is not None and tp == tp:
            total += tp * (1 if engines is None or engines != engines else engines)
    return int(total) or None


def pareto_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per cell with rates: cell_id, per_worker (output tokens/s), per_user (1000 / median TPOT), mode,
    and is_best: no other cell is at least as good in both and better in one."""
    rows = []
    for cell in cells.to_dict(orient="records"):
        workers, rate, tpot = num_workers(cell), cell["output_tokens_per_s"], cell["tpot_ms_p50"]
        if workers and pd.notna(rate) and pd.notna(tpot) and tpot > 0:
            point = {"per_worker": rate / workers, "per_user": 1000 / tpot}
            rows.append({"cell_id": cell["cell_id"], "mode": str(cell.get("mode", "")), **point})
    best, highest = set(), -1.0
    for i in sorted(range(len(rows)), key=lambda i: (-rows[i]["per_user"], -rows[i]["per_worker"])):
        if rows[i]["per_worker"] > highest:
            highest = rows[i]["per_worker"]
            best.add(i)
    return [{**row, "is_best": i in best} for i, row in enumerate(rows)]


def pareto_plot(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """The figure `pareto` as a list of one; empty where fewer than two cells have rates."""
    rows = pareto_rows(cells)
    if len(rows) < 2:
        return []
    front = sorted((row for row in rows if row["is_best"]), key=lambda row: row["per_user"])
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best",
            "x": [row["per_user"] for row in front],
            "y": [row["per_worker"] for row in front],
            "line": {"color": "soft", "width": 1.2, "dash": "dot"},
            "hoverinfo": "skip",
        }
    ]
    for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        of_mode = [row for row in rows if row["mode"] == mode]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": mode,
                "x": [row["per_user"] for row in of_mode],
                "y": [row["per_worker"] for row in of_mode],
                "text": [row["cell_id"] for row in of_mode],
                "hovertemplate": "%{text}<br>%{x:.1f} tokens/s per user<br>%{y:.2f} tokens/s per worker"
                "<extra></extra>",
                "marker": {"size": 9, "opacity": 0.8, "color": PALETTE[number % len(PALETTE)]},
            }
        )
    layout = {
        "height": 360,
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2},
        "xaxis": {"title": {"text": "tokens/s per user"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "tokens/s per worker"}, "rangemode": "tozero"},
    }
    return [{"id": "pareto", "data": data, "layout": layout}]
