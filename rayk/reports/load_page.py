"""The report of a bench: what was sent, what came back, how sure that is, and whether to believe it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from rayk.reports.load_answers import MAX_ROWS, client_spreads, client_waterfall, load_answers
from rayk.reports.load_fields import METRICS, STATISTICS, VERDICTS, load_headline
from rayk.reports.page import Column, Page, Plot, Section
from rayk.reports.plots import LEGEND, PALETTE, SYMBOLS, plain
from rayk.reports.result import Result
from rayk.reports.terminal import terminal_table
from rayk.reports.values import is_null

TONES = {"VALID": "PASS", "NOISY": "NEAR_TIE", "INVALID": "unmet"}  # verdict -> the chip it wears
MAX_POINTS = 4000  # requests that a plot shows; every k-th of more
NOTE = (
    "Times in ms, from when a request was due (closed: sent) to its first and its last token. ITL are the "
    "gaps between chunks that carry tokens, TPOT is the time after the first chunk over the tokens after "
    "the first. The interval in brackets holds the true value with 95% confidence, by batch means over "
    "requests in order of arrival. A percentile is given where both ends of its interval lie within the "
    "sample: of independent requests from 12 on for p50, 58 for p90, 618 for p99. Requests that failed "
    "count as infinitely late in percentiles; means are of what was answered. Measured are the requests "
    "between warm-up (MSER-5) and the time when the load begins to run out."
)
RATES = (
    Column("cell_id", "cell_id"),
    Column("verdict", "verdict", tone="tone"),
    Column("offered/s", "offered_per_s", ".2f"),
    Column("answered/s", "answered_per_s", ".2f"),
    Column("goodput/s", "goodput_per_s", ".2f"),
    Column("good %", "good_percent", ".1f"),
    Column("tokens/s", "output_tokens_per_s", ",.1f"),
    Column("in flight", "mean_in_flight", ".1f"),
)
REQUESTS = (
    Column("cell_id", "cell_id"),
    Column("measured", "num_measured", ",d"),
    Column("of", "num_requests", ",d"),
    Column("failed", "num_failed", ",d"),
    Column("of them 429", "num_refused", ",d"),
    Column("timed out", "num_timeouts", ",d"),
    Column("cached %", "cached_percent", ".1f"),
    Column("tokens/chunk", "tokens_per_chunk", ".2f"),
    Column("accepted %", "accepted_percent", ".1f"),
)
LATENCIES = (
    Column("cell_id", "cell_id"),
    Column("metric", "metric"),
    *(Column(name, name) for name in STATISTICS),
    Column("values", "num_values", ",d"),
)
GENERATOR = (
    Column("cell_id", "cell_id"),
    *(
        Column(f"{what} late, p{percent} ms", f"{name}_lag_ms_p{percent}", ".2f")
        for name, what in (("send", "sent"), ("loop", "stamped"))
        for percent in (50, 90, 99)
    ),
    Column("CPU %", "cpu_percent", ".0f"),
)


def request_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [c for c in REQUESTS if any(row[c.key] is not None for row in rows)]


def rate_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            **_plain(cell),
            "tone": TONES[cell["verdict"]],
            "good_percent": _times(cell["good_share"], 100),
            "cpu_percent": _times(cell["generator_cpu_share"], 100),
            "cached_percent": _cached_percent(cell),
            "tokens_per_chunk": _times(cell.get("tokens_per_chunk"), 1),
            "accepted_percent": _times(cell.get("acceptance_rate"), 100),
        }
        for cell in cells.to_dict(orient="records")
    ]


def _cached_percent(cell: Mapping[Any, Any]) -> float | None:
    """Compute the cached share; None where the server, or an older bench, does not tell."""
    cached, total = (cell.get(f"num_{what}_tokens") for what in ("cached", "prompt"))
    return None if is_null(total) or not total else _times(cached, 100 / float(total))


def latency_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Make a row per load and metric, e.g. `12.3 (11.9 to 12.8)`; empty where the sample supports no
    value."""
    return [
        {
            "cell_id": cell["cell_id"],
            "metric": metric.upper(),
            **{name: _estimate(cell, f"{metric}_ms_{name}") for name in STATISTICS},
            "num_values": cell[f"num_{metric}_values"],
        }
        for cell in cells.to_dict(orient="records")
        for metric in METRICS
    ]


def _estimate(cell: Mapping[Any, Any], name: str) -> str:
    value, low, high = (cell[f"{name}{end}"] for end in ("", "_low", "_high"))
    if is_null(value):
        return ""
    least = _short(max(0.0, low))  # no time is less, whatever the t distribution says
    ends = f"over {least}" if is_null(high) else f"{least} to {_short(high)}"
    return f"{_short(value)} ({ends})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _times(value: Any, factor: float) -> float | None:
    return None if is_null(value) else float(value) * factor


def _plain(cell: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): None if is_null(value) else value for key, value in cell.items()}


def load_tables(cells: pd.DataFrame) -> list[Table]:
    rates = rate_rows(cells)
    return [
        terminal_table(load_headline(cells), RATES, rates),
        terminal_table("Requests", request_columns(rates), rates),
        terminal_table("Latencies, ms (95%)", LATENCIES, latency_rows(cells)),
    ]


def reasons(cells: pd.DataFrame) -> list[str]:
    """Write `load: VERDICT: reason` for each load that has a reason."""
    return [
        f"{cell['cell_id']}: {cell['verdict']}: {cell['reason']}"
        for cell in cells.to_dict(orient="records")
        if cell["reason"]
    ]


def folded(text: str) -> str:
    return text.replace("; ", ";\n    ")


def load_page(result: Result) -> Page:
    cells = result.cells
    counts = cells["verdict"].value_counts().to_dict()
    tokens, rates = result.requests["num_output_tokens"].sum(), rate_rows(cells)
    return Page(
        eyebrow=f"rayk bench · {', '.join(dict.fromkeys(cells['model']))}",
        title=load_headline(cells),
        chips=[(TONES[verdict], f"{counts[verdict]} {verdict}") for verdict in VERDICTS if verdict in counts],
        stats=[
            (f"{len(result.requests):,}", "requests"),
            (f"{int(tokens):,}", "output tokens"),
            (f"{cells['wall_s'].sum():,.0f} s", "under load"),
        ],
        answers=load_answers(result),
        sections=[
            Section(title="Rates", note=_rates_note(cells), columns=RATES, rows=rates),
            Section(
                title="Verdicts",
                text="\n".join(map(folded, reasons(cells))) or "Nothing is held against any number.",
            ),
            Section(
                title="Latencies",
                note=NOTE,
                columns=LATENCIES,
                rows=latency_rows(cells),
                plots=client_spreads(result),
            ),
            Section(
                title="Requests, stage by stage",
                note="A bar per answered request of a load, from when it was due; choose one to see its "
                f"parts. Of a longer load the first {MAX_ROWS}.",
                waterfall=client_waterfall(result),
                waterfall_of="Load",
            ),
            Section(
                title="Requests",
                note="Of those measured; cached are prompt tokens that the server says it had, accepted are "
                "of the tokens that it proposed to itself. One mark per "
                "request, where it was due; hollow ones are warm-up and cool-down.",
                columns=request_columns(rates),
                rows=rates,
                plots=[_scatter(result, name) for name in ("ttft", "e2e")],
            ),
            Section(title="The generator", note=GENERATOR_NOTE, columns=GENERATOR, rows=rates),
            Section(title="Spec", is_folded=True, text=result.spec_yaml),
        ],
        environment=result.environment,
        footer="Tables: cells.parquet and requests.parquet, beside this file.",
    )


GENERATOR_NOTE = (
    "How late requests left after they were due, and how late the generator's event loop woke up, some "
    "hundred times a second: times are no finer than that. Latencies contain both."
)


def _rates_note(cells: pd.DataFrame) -> str:
    slos = ", ".join(dict.fromkeys(text for text in cells["slo"] if isinstance(text, str)))
    kept = f"a request is good if it keeps {slos}" if slos else "without objectives every answer is good"
    return (
        f"Per second of the measured window; {kept}. Requests that failed are not good. Answered and goodput "
        "count answers that ended in the window; offered, good %, measured and failed are of requests due in "
        "it."
    )


def _scatter(result: Result, metric: str) -> Plot:
    data: list[dict[str, Any]] = []
    known = result.requests.dropna(subset=[f"{metric}_ms"]).groupby("cell_id", sort=False)
    for number, (cell_id, rows) in enumerate(known):
        rows = rows.iloc[:: math.ceil(len(rows) / MAX_POINTS) or 1]
        shape = SYMBOLS[number // len(PALETTE) % len(SYMBOLS)]
        symbols = [shape if phase == "measured" else f"{shape}-open" for phase in rows["phase"]]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(cell_id),
                "x": (rows["due_ms"] / 1000).tolist(),
                "y": rows[f"{metric}_ms"].tolist(),
                "marker": {
                    "size": 6,
                    "opacity": 0.7,
                    "symbol": symbols,
                    "color": PALETTE[number % len(PALETTE)],
                },
            }
        )
    layout = {
        "height": 340,
        "showlegend": len(data) > 1,
        "legend": LEGEND,
        "xaxis": {"title": {"text": "due, s after the load began"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{metric.upper()}, ms"}, "rangemode": "tozero"},
    }
    return Plot(id=metric, title=f"{metric.upper()}, ms", data=data, layout=layout)
