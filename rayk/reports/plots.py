"""Draw Plotly figures as plain data; the page's script gives them the page's colours."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.derived import moves_of
from rayk.reports.divided import divided_side, num_stages
from rayk.reports.page import Plot
from rayk.reports.result import Result
from rayk.reports.values import format_bytes

# colours of report.css that the colour-blind tell apart, on light and dark
PALETTE = tuple(f"series{number}" for number in range(1, 7))
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross")
# above the figure: the axis' title lies below
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
SPREADS = ("ttft", "itl", "e2e")  # metrics of the curves
MAX_STEPS = 200  # points of a curve: of more values, as many quantiles
MAX_BOXES = 60  # cells a latency plot shows; the first ones of a longer run
MAX_MARKS = 3000  # requests that a cloud of marks shows; every k-th of more


def spread_plots(result: Result) -> list[Plot]:
    """Draw per metric (`spread-<metric>`) the share of requests (of ITL: gaps) that took at most so long, a
    curve per pair of sizes: the colour is the prefill side's, the dash the decode side's, grey one engine for
    both."""
    sizes = _sizes(result.cells)
    styles = _styles(sorted(set(sizes.values())))
    labels = {cell_id: _label(*of_cell) for cell_id, of_cell in sizes.items()}
    requests = result.requests.assign(sizes=result.requests["cell_id"].map(labels))
    plots = []
    for metric in SPREADS:
        data = []
        for name, rows in requests.groupby("sizes", sort=True):
            values = sorted_values(rows[f"{metric}_ms"])
            if len(values):
                data.append(curve(str(name), values, *styles[str(name)]))
        if data:
            plots.append(
                Plot(
                    id=f"spread-{metric}",
                    title=f"{metric.upper()}, ms",
                    data=data,
                    layout=spread_layout(metric, data),
                    is_wide=metric == SPREADS[-1],
                )
            )
    return plots


def marks_by_sizes(cells: pd.DataFrame, points: pd.DataFrame, hover: str) -> list[dict[str, Any]]:
    """Make a trace of marks per pair of sizes from points with cell_id, x, y and text (shown by `hover`).
    The colour is the prefill side's size, the symbol the decode side's."""
    sizes = _sizes(cells)
    pairs = sorted(set(sizes.values()))
    styles = _styles(pairs)
    labels = {cell_id: _label(*of_cell) for cell_id, of_cell in sizes.items()}
    traces = []
    for name, rows in points.groupby(points["cell_id"].map(labels), sort=True):
        colour, dash = styles[str(name)]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": str(name),
                "x": rows["x"].tolist(),
                "y": rows["y"].tolist(),
                "text": [plain(text) for text in rows["text"]],
                "hovertemplate": f"%{{text}}<br>{hover}<extra></extra>",
                "marker": {"size": 9, "opacity": 0.8, "color": colour, "symbol": SYMBOLS[DASHES.index(dash)]},
            }
        )
    return traces


def plain(text: object) -> str:
    """Escape a text for Plotly, which reads some tags; lines are parted by <br>."""
    return html.escape(str(text), quote=False).replace("\n", "<br>")


Size = tuple[int, str]
"""TP of a side, and what else its engines divide (`divided.divided_side`)."""


def _sizes(cells: pd.DataFrame) -> dict[Any, tuple[Size, Size]]:
    """Map cell ids to the prefill and the decode side's size; decode TP 0: one engine does it all; both 0: no
    axis tells."""
    if not {"prefill.tp", "decode.tp"}.issubset(cells):
        return dict.fromkeys(cells["cell_id"], ((0, ""), (0, "")))
    sides = ("prefill", "decode")
    tp = cells[[f"{side}.tp" for side in sides]].fillna(0).astype(int).to_numpy()
    found: dict[Any, tuple[Size, Size]] = {}
    for cell, sizes in zip(cells.to_dict(orient="records"), tp.tolist(), strict=True):
        prefill, decode = ((size, divided_side(cell, side)) for side, size in zip(sides, sizes, strict=True))
        found[cell["cell_id"]] = (prefill, decode)
    return found


def _label(prefill: Size, decode: Size) -> str:
    """Name a pair of sizes, e.g. `P 2, D 1`, `P 2 DCP 2, D 1`."""
    p, d = (" ".join(filter(None, (str(tp), beside))) for tp, beside in (prefill, decode))
    return f"P {p}, D {d}" if decode[0] else f"TP {p}" if prefill[0] else "all"


def _styles(sizes: Sequence[tuple[Size, Size]]) -> dict[str, tuple[str, str]]:
    prefills = sorted({prefill for prefill, decode in sizes if decode[0]})
    decodes = sorted({decode for _, decode in sizes if decode[0]})
    alone = [prefill for prefill, decode in sizes if not decode[0]]
    return {
        _label(prefill, decode): (
            PALETTE[prefills.index(prefill) % len(PALETTE)] if decode[0] else "soft",
            DASHES[(decodes.index(decode) if decode[0] else alone.index(prefill)) % len(DASHES)],
        )
        for prefill, decode in sizes
    }


def sorted_values(column: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """Sort the numbers of a column of numbers or of lists of them."""
    known = column.dropna()
    if len(known) and isinstance(known.iloc[0], np.ndarray | list):
        known = pd.Series(np.concatenate([np.asarray(v, float) for v in known]))
    return np.sort(known.to_numpy(float))


def curve(name: str, values: np.ndarray[Any, Any], colour: str, dash: str) -> dict[str, Any]:
    """Draw the empirical distribution: of few values a step each, of many quantiles."""
    count, name = len(values), plain(name)
    ranks = np.unique(np.linspace(1, count, min(count, MAX_STEPS)).round().astype(int))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [float(v) for v in values[ranks - 1].round(3)],
        "y": [float(v) for v in (100 * ranks / count).round(2)],
        "line": {"color": colour, "dash": dash, "width": 1.8, "shape": "hv"},
        "hovertemplate": f"{name}: %{{y:.0f}}% within %{{x:.2f}} ms<extra></extra>",
    }


def spread_layout(metric: str, data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [value for trace in data for value in trace["x"] if value > 0] or [1.0]
    low, high = math.log10(min(values)), math.log10(max(values))
    room = 0.03 * max(high - low, 0.1)
    ticks = round_values(min(values), max(values))
    return {
        "height": 330 + 6 * len(data),
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "xaxis": log_axis(f"{metric.upper()}, ms", ticks) | {"range": [low - room, high + room]},
        "yaxis": {"title": {"text": "% of gaps" if metric == "itl" else "% of requests"}, "range": [0, 101]},
    }


def log_axis(
    title: str, ticks: Sequence[float], form: Callable[[float], str] = "{:,g}".format
) -> dict[str, Any]:
    texts = [form(tick) for tick in ticks]
    return {"title": {"text": f"{title} (logarithmic)"}, "type": "log", "tickvals": ticks, "ticktext": texts}


def round_values(low: float, high: float) -> list[float]:
    """Choose ticks of a logarithmic axis, from below `low` to above `high`: the wider the range, the fewer
    per decade."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = (1, 2, 5) if len(powers) <= 4 else (1,)
    steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else few
    return [float(f"{step}e{power}") for power in powers for step in steps]


def num_workers(cell: Mapping[Any, Any]) -> int | None:
    """Count the ranks of a cell's engines; None where its axes do not tell."""
    total = 0.0
    for side in ("prefill", "decode"):
        tp, engines = (cell.get(f"{side}.{name}") for name in ("tp", "num_engines"))
        if tp is not None and tp == tp:
            total += tp * num_stages(cell, side) * (1 if engines is None or engines != engines else engines)
    return int(total) or None


def pareto_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Make a row per cell with rates: cell_id, per_worker (output tokens/s), per_user (1000 / median TPOT),
    mode, and is_best: no other cell is as good in both and better in one."""
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


def pareto_plot(cells: pd.DataFrame) -> list[Plot]:
    """Draw `pareto`, unless fewer than two cells have rates."""
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
    points = pd.DataFrame(rows).rename(columns={"per_user": "x", "per_worker": "y"})
    hover = "%{x:.1f} tokens/s per user<br>%{y:.2f} tokens/s per worker"
    data += marks_by_sizes(cells, points.assign(text=points["cell_id"]), hover)
    layout = {
        "height": 360 + 6 * len(data),
        "showlegend": True,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "tokens/s per user"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "tokens/s per worker"}, "rangemode": "tozero"},
    }
    return [Plot(id="pareto", data=data, layout=layout, is_wide=True)]


def transfer_plots(result: Result) -> list[Plot]:
    """Draw bytes against GB/s, a mark per request."""
    moved = moves_of(result)
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
