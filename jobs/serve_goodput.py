"""Numbers of jobs/serve_bench.py: goodput by setup and rate, and what no other setup beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayk.reports.page import Column, Plot
from rayk.reports.plots import PALETTE

ALL = (
    Column(title="setup", key="setup"),
    Column(title="rate", key="rate", spec="g"),
    Column(title="verdict", key="verdict"),
    Column(title="goodput/s", key="goodput_per_s", spec=".2f"),
    Column(title="good %", key="good_percent", spec=".0f"),
    Column(title="answered/s", key="answered_per_s", spec=".2f"),
    Column(title="tokens/s", key="output_tokens_per_s", spec=",.1f"),
    Column(title="per worker", key="worker_tokens_per_s", spec=",.1f"),
    Column(title="per user", key="user_tokens_per_s", spec=",.1f"),
    Column(title="TTFT ms", key="ttft_ms_mean", spec=",.1f"),
    Column(title="±", key="ttft_half", spec=",.1f"),
    Column(title="TPOT ms", key="tpot_ms_mean", spec=",.2f"),
    Column(title="±", key="tpot_half", spec=",.2f"),
    Column(title="TTFT p90", key="ttft_ms_p90", spec=",.1f"),
    Column(title="failed", key="num_failed", spec="d"),
    Column(title="unbeaten", key="unbeaten"),
)


def pareto(points: Sequence[tuple[float | None, float | None]]) -> set[int]:
    """Indexes of the points that no other point reaches in one coordinate and exceeds in the other."""
    known = [(i, x, y) for i, (x, y) in enumerate(points) if x is not None and y is not None]
    found: set[int] = set()
    best = (float("inf"), float("-inf"))
    # From the right, among equal x the highest first: a point must be higher than all before it, or be the
    # last one found again.
    for i, x, y in sorted(known, key=lambda point: (-point[1], -point[2])):
        if y > best[1] or (x, y) == best:
            found.add(i)
            best = (x, y)
    return found


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    unbeaten = pareto([(row["user_tokens_per_s"], row["worker_tokens_per_s"]) for row in rows])
    return [
        {
            **row,
            "good_percent": None if row.get("good_share") is None else 100 * row["good_share"],
            "ttft_half": _half(row, "ttft"),
            "tpot_half": _half(row, "tpot"),
            "unbeaten": "yes" if i in unbeaten else "",
            **{key: row.get(key) for key in ("goodput_per_s", "answered_per_s", "output_tokens_per_s")},
        }
        for i, row in enumerate(rows)
    ]


def _half(row: Mapping[str, Any], metric: str) -> float | None:
    high, value = row[f"{metric}_ms_mean_high"], row[f"{metric}_ms_mean"]
    return None if high is None or value is None else high - value


def goodput_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Column], list[dict[str, Any]]]:
    """A row per setup, a column per rate, and the best of each row; the best setup first."""
    rates = sorted({row["rate"] for row in rows})
    columns = [Column(title="setup", key="setup"), Column(title="best", key="best", spec=".2f")]
    columns += [Column(title=f"at {rate:g}/s", key=f"at {rate:g}", spec=".2f") for rate in rates]
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        told = table.setdefault(
            row["setup"], {"setup": row["setup"], "best": 0.0, **{c.key: None for c in columns[2:]}}
        )
        value = row.get("goodput_per_s")
        told[f"at {row['rate']:g}"] = value
        told["best"] = max(told["best"], value or 0.0)
    return columns, sorted(table.values(), key=lambda told: -told["best"])


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Goodput by rate, and what users get for what workers give."""
    rates = sorted({row["rate"] for row in rows})
    unbeaten = pareto([(row["user_tokens_per_s"], row["worker_tokens_per_s"]) for row in rows])
    front = sorted((rows[i]["user_tokens_per_s"], rows[i]["worker_tokens_per_s"]) for i in unbeaten)
    xs, ys = ([point[axis] for point in front] for axis in (0, 1))
    return [
        _figure(
            "goodput",
            "Goodput by rate",
            [_line("all good", rates, rates), *_series(rows, "rate", "goodput_per_s")],
            ("sent, requests/s", "goodput, requests/s"),
        ),
        _figure(
            "pareto",
            "Pareto",
            [_line("unbeaten", xs, ys), *_series(rows, "user_tokens_per_s", "worker_tokens_per_s")],
            ("tokens/s of one stream", "tokens/s of one worker"),
        ),
    ]


def _line(name: str, xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    line = {"color": "soft", "width": 2}
    return {"type": "scatter", "mode": "lines", "name": name, "x": xs, "y": ys, "line": line}


def _figure(id: str, title: str, data: list[dict[str, Any]], axes: tuple[str, str]) -> Plot:
    told = {
        name: {"title": {"text": text}, "rangemode": "tozero"}
        for name, text in zip(("xaxis", "yaxis"), axes, strict=True)
    }
    return Plot(id=id, title=title, data=data, layout={"height": 380, "showlegend": True, **told})


def _series(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[dict[str, Any]]:
    """A trace per setup: circles where it is aggregated, diamonds where it is not."""
    traces = []
    for number, name in enumerate(dict.fromkeys(row["setup"] for row in rows)):
        of = [
            row for row in rows if row["setup"] == name and row.get(x) is not None and row.get(y) is not None
        ]
        if not of:
            continue
        colour = PALETTE[number % len(PALETTE)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [row[x] for row in of],
                "y": [row[y] for row in of],
                "text": [f"{name} at {row['rate']:g}/s, {row['verdict']}" for row in of],
                "hovertemplate": "%{text}<br>%{x:.2f}, %{y:.2f}<extra></extra>",
                "marker": {
                    "size": 9,
                    "color": colour,
                    "symbol": "circle" if of[0]["mode"] == "aggregated" else "diamond",
                },
                "line": {"width": 1, "color": colour, "dash": "dot"},
            }
        )
    return traces
