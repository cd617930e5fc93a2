"""Draw Plotly figures as plain data; the page's script gives them the page's colours."""

from __future__ import annotations

import math

import pandas as pd

from rayk.reports.moves import moves
from rayk.reports.page import Plot
from rayk.reports.result import Result
from rayk.reports.spreads import LEGEND, log_axis, marks_by_sizes, plain, round_values
from rayk.reports.values import format_bytes

MAX_BOXES = 60  # cells a latency plot shows; the first ones of a longer run


MAX_MARKS = 3000  # requests that a cloud of marks shows; every k-th of more


def transfer_plots(result: Result) -> list[Plot]:
    """Draw bytes against GB/s, a mark per request."""
    moved = moves(result.requests, result.transfers)
    if moved.empty:
        return []
    sums = moved.iloc[:: math.ceil(len(moved) / MAX_MARKS) or 1]
    rate = sums["gb_per_s"]
    sizes = _powers_of_two(int(sums["bytes"].min()), int(sums["bytes"].max()))
    named = zip(sums["cell_id"], sums["request_id"], sums["descriptors"].astype(int), strict=True)
    texts = [f"{cell_id}\n{request_id}\n{count:,} descriptors" for cell_id, request_id, count in named]
    points = pd.DataFrame({"cell_id": sums["cell_id"], "x": sums["bytes"], "y": rate, "text": texts})
    traces = marks_by_sizes(result.cells, points, "%{x:,} bytes, %{y:.3g} GB/s")
    layout = {
        "height": 340 + 6 * len(traces),
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": log_axis("bytes of a request", sizes, format_bytes),
        "yaxis": log_axis("GB/s", round_values(float(rate.min()), float(rate.max()))),
    }
    return [Plot(id="transfers", data=traces, layout=layout, is_wide=True)]


def _powers_of_two(low: int, high: int) -> list[int]:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, (last - first) // 5)
    return [2**i for i in range(first, last + 1, step)]


def latency_plots(result: Result) -> list[Plot]:
    found = []
    for name in ("ttft", "tpot"):
        measured = result.requests[result.requests[f"{name}_ms"].notna()]
        if len(measured):
            found.append(_latency_plot(name, measured, f"{name}_ms"))
    return found


def _latency_plot(name: str, requests: pd.DataFrame, column: str) -> Plot:
    cells = list(dict.fromkeys(requests["cell_id"]))[:MAX_BOXES]
    shown = requests[requests["cell_id"].isin(cells)]
    trace = {
        "type": "box",
        "orientation": "h",
        "x": shown[column].tolist(),
        "y": shown["cell_id"].tolist(),
        "boxpoints": "all",
        "jitter": 0.4,
        "pointpos": 0,
        "marker": {"size": 4, "opacity": 0.6},
        "text": [plain(cell_id) for cell_id in shown["cell_id"]],  # whole, where the axis shortens it
        "hovertemplate": "%{text}: %{x:.2f} ms<extra></extra>",
    }
    layout = {
        "height": 110 + 26 * len(cells),
        "xaxis": {"rangemode": "tozero", "title": {"text": f"{name.upper()}, ms"}},
        "yaxis": {"autorange": "reversed", "type": "category", "ticks": ""},
    }
    return Plot(id=name, title=f"{name.upper()} by cell, ms", data=[trace], layout=layout)
