"""Plotly figures as plain data; the page's script gives them the page's colours."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from rayk.reports.result import Result
from rayk.reports.verdicts import format_bytes

MAX_BOXES = 60
"""Cells a latency plot shows; the first ones of a longer run."""


MAX_MARKS = 3000
"""Requests that a cloud of marks shows; every k-th of more."""


def make_plots(result: Result) -> list[dict[str, Any]]:
    """Plots that have data: transfers, ttft, tpot; each with id, data, layout."""
    plots = []
    moved = result.transfers.dropna(subset=["bytes", "transfer_ms"])
    if len(moved):
        plots.append(_transfer_plot(moved))
    for name in ("ttft", "tpot"):
        column = f"{name}_ms"
        measured = result.requests[result.requests[column].notna()]
        if len(measured):
            plots.append(_latency_plot(name, measured, column))
    return plots


def _transfer_plot(transfers: pd.DataFrame) -> dict[str, Any]:
    """Bytes against GB/s, one mark per request, coloured by descriptors."""
    keys = ["cell_id", "repeat", "request_id"]
    sums = transfers.groupby(keys, sort=False)[["bytes", "num_descriptors", "transfer_ms"]].sum()
    sums = sums[sums["transfer_ms"] > 0].reset_index()
    sums = sums.iloc[:: math.ceil(len(sums) / MAX_MARKS) or 1]
    rate = sums["bytes"] / sums["transfer_ms"] / 1e6  # bytes per ms -> 10^9 bytes per s
    descriptors = sums["num_descriptors"].clip(lower=1)
    ticks = _powers_of_two(int(descriptors.min()), int(descriptors.max())) if len(sums) else []
    sizes = _powers_of_two(int(sums["bytes"].min()), int(sums["bytes"].max())) if len(sums) else []
    text = [
        f"{row.cell_id}<br>{row.request_id}<br>{row.num_descriptors:,} descriptors"
        for row in sums.itertuples()
    ]
    marker = {
        "size": 8,
        "opacity": 0.75,
        "color": [math.log2(n) for n in descriptors],
        "colorscale": "page",
        "colorbar": {
            "title": {"text": "descriptors", "side": "right"},
            "thickness": 9,
            "outlinewidth": 0,
            "tickvals": [math.log2(t) for t in ticks],
            "ticktext": [f"{t:,}" for t in ticks],
        },
    }
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": sums["bytes"].tolist(),
        "y": rate.tolist(),
        "text": text,
        "hovertemplate": "%{text}<br>%{x:,} bytes, %{y:.3f} GB/s<extra></extra>",
        "marker": marker,
    }
    layout = {
        "height": 340,
        "xaxis": {
            "title": {"text": "bytes"},
            "type": "log",
            "tickvals": sizes,
            "ticktext": [format_bytes(n) for n in sizes],
        },
        "yaxis": {"title": {"text": "GB/s"}, "rangemode": "tozero"},
    }
    return {"id": "transfers", "data": [trace], "layout": layout}


def _powers_of_two(low: int, high: int) -> list[int]:
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, (last - first) // 5)
    return [2**i for i in range(first, last + 1, step)]


def _latency_plot(name: str, requests: pd.DataFrame, column: str) -> dict[str, Any]:
    """Horizontal boxes, one per cell in the order of the run, from the top."""
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
        "text": shown["cell_id"].tolist(),  # whole, where the axis shortens it
        "hovertemplate": "%{text}: %{x:.2f} ms<extra></extra>",
    }
    layout = {
        "height": 90 + 26 * len(cells),
        "xaxis": {"rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category", "ticks": ""},
    }
    return {"id": name, "data": [trace], "layout": layout}
