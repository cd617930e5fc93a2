"""The report of serve_bench.py: goodput by setup and rate, and what no other setup beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayk.reports.load_page import PALETTE, folded
from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Page, Plot, Section, text_rows

TABLES = ("setups",)
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
GOODPUT_NOTE = (
    "Requests per second that kept every objective, by the rate they were sent at. The same prompts came at "
    "the same times to every setup; workers are equal in number. A = aggregated, P = prefill, D = decode; "
    "NxTPk: N engines of k ranks."
)
PARETO_NOTE = (
    "On the right each point is a setup at a rate: along x the tokens per second that one stream gets after "
    "its first token (1 / mean TPOT), along y the tokens per second that one worker gives. The line joins "
    "the points that no other one beats in both. TTFT is not in it: the table has it."
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
    """Rows as the table of all numbers takes them."""
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


def markdown(rows: Sequence[Mapping[str, Any]], failures: Sequence[str], about: str) -> str:
    """The tables as GitHub Markdown."""
    columns, goodput = goodput_table(rows)
    lines = ["# Aggregated and disaggregated serving", "", about, "", "## Goodput, requests per second", ""]
    lines += markdown_table([c.title for c in columns], text_rows(columns, goodput))
    lines += ["", GOODPUT_NOTE, "", "## All numbers", ""]
    lines += markdown_table([c.title for c in ALL], text_rows(ALL, shown(rows)))
    return "\n".join([*lines, "", *(f"- failed: {text}" for text in failures), *_reasons(rows)])


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"- {row['setup']} at {row['rate']:g}/s: {row['verdict']}: {row['reason']}"
        for row in rows
        if row["reason"]
    ]


def make_page(
    rows: Sequence[Mapping[str, Any]], failures: Sequence[str], about: str, environment: Mapping[str, Any]
) -> Page:
    """The report."""
    columns, goodput = goodput_table(rows)
    best = {mode: _best(rows, mode) for mode in ("aggregated", "disaggregated")}
    num_invalid = sum(row["verdict"] == "INVALID" for row in rows)
    chips = [("unmet", f"{len(failures)} setups failed")] if failures else []
    chips += [("unmet", f"{num_invalid} INVALID loads")] if num_invalid else [("met", "no INVALID load")]
    return Page(
        eyebrow="serving",
        title="Aggregated and disaggregated serving on equal workers",
        chips=chips,
        stats=[
            (f"{row['goodput_per_s']:.2f}/s", f"best {mode}: {row['setup']}")
            for mode, row in best.items()
            if row
        ],
        sections=[
            Section(
                title="Goodput, and what users get for what workers give",
                note=f"{about} {GOODPUT_NOTE} {PARETO_NOTE}",
                columns=columns,
                rows=goodput,
                plots=[_goodput_plot(rows), _pareto_plot(rows)],
            ),
            Section(title="All numbers", columns=ALL, rows=shown(rows)),
            Section(
                title="Verdicts",
                text="\n".join(map(folded, [*failures, *_reasons(rows)])) or "Nothing is held against any.",
            ),
        ],
        environment=environment,
        footer="python jobs/serve_bench.py.",
    )


def _best(rows: Sequence[Mapping[str, Any]], mode: str) -> Mapping[str, Any] | None:
    known = [row for row in rows if row["mode"] == mode and row.get("goodput_per_s") is not None]
    return max(known, key=lambda row: row["goodput_per_s"], default=None)


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


def _goodput_plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    rates = sorted({row["rate"] for row in rows})
    ideal = {
        "type": "scatter",
        "mode": "lines",
        "name": "all good",
        "x": rates,
        "y": rates,
        "line": {"color": "soft", "width": 1},
    }
    layout = {
        "height": 380,
        "showlegend": True,
        "xaxis": {"title": {"text": "sent, requests/s"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "goodput, requests/s"}, "rangemode": "tozero"},
    }
    return Plot(
        id="goodput",
        title="Goodput by rate",
        data=[ideal, *_series(rows, "rate", "goodput_per_s")],
        layout=layout,
    )


def _pareto_plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    unbeaten = pareto([(row["user_tokens_per_s"], row["worker_tokens_per_s"]) for row in rows])
    front = sorted((rows[i]["user_tokens_per_s"], rows[i]["worker_tokens_per_s"]) for i in unbeaten)
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "unbeaten",
        "x": [x for x, _ in front],
        "y": [y for _, y in front],
        "line": {"color": "soft", "width": 2},
    }
    layout = {
        "height": 380,
        "showlegend": True,
        "xaxis": {"title": {"text": "tokens/s of one stream"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "tokens/s of one worker"}, "rangemode": "tozero"},
    }
    series = _series(rows, "user_tokens_per_s", "worker_tokens_per_s")
    return Plot(id="pareto", title="Pareto", data=[line, *series], layout=layout)
