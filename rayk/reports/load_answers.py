"""Answers at the top of a bench's report: can it be believed, how fast was it, where did requests' time
go."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.answers import NAMED
from rayk.reports.load_fields import VERDICTS
from rayk.reports.page import Answer, Plot
from rayk.reports.plots import DASHES, PALETTE, curve, sorted_values, spread_layout
from rayk.reports.rerun import bench_commands
from rayk.reports.result import Result
from rayk.reports.stages import TimePart, waterfall
from rayk.reports.values import format_value

# what a client sees of a request, in order; they add up to its E2E
PARTS = (
    TimePart(name="sent late", limit="the generator", colour="#9aa4ad", meaning="due, not yet sent"),
    TimePart(
        name="first token",
        limit="getting the first token",
        colour="#3b7dd8",
        meaning="from sent to the first token: the way there, the server's queue and its prefill",
    ),
    TimePart(
        name="later tokens",
        limit="the later tokens",
        colour="#2f9e77",
        meaning="from the first token to the last",
    ),
)
MAX_ROWS = 400  # requests of a load that the waterfall shows, the first ones
SPREADS = ("ttft", "itl", "tpot", "e2e")


def load_answers(result: Result) -> list[Answer]:
    cells = result.cells
    return [
        Answer(question="Can the numbers be believed?", text=belief_text(cells), tone=_tone(cells)),
        Answer(question="How fast was it?", text=speed_text(cells)),
        Answer(question="Where is time spent?", text=time_text(result), shares=client_shares(result)),
        Answer(
            question="How do I run it again?",
            text=needs_text(cells),
            command=bench_commands(result.environment),
        ),
    ]


def _tone(cells: pd.DataFrame) -> str:
    if (cells["verdict"] == "INVALID").any():
        return "unmet"
    return "met" if (cells["verdict"] == "VALID").all() else ""


def belief_text(cells: pd.DataFrame) -> str:
    counts = {verdict: int((cells["verdict"] == verdict).sum()) for verdict in VERDICTS}
    worst = max((verdict for verdict in VERDICTS if counts[verdict]), key=VERDICTS.index)
    of = f"{counts[worst]} of {len(cells)} load{'s'[: len(cells) != 1]}"
    verb = "is" if counts[worst] == 1 else "are"
    start = {
        "VALID": f"Yes: {of} {verb} VALID, nothing is held against any number",
        "NOISY": f"With care: {of} {verb} NOISY",
        "INVALID": f"No: {of} {verb} INVALID",
    }[worst]
    named = cells[cells["verdict"] == worst] if worst != "VALID" else cells.iloc[:0]
    told = [f"{cell['cell_id']}: {cell['reason']}" for cell in named.head(NAMED).to_dict(orient="records")]
    more = f" (and {len(named) - NAMED} more)" if len(named) > NAMED else ""
    return f"{start}{'. ' if told else ''}{'; '.join(told)}{more}."


def speed_text(cells: pd.DataFrame) -> str:
    """Tell rates and medians of the load with the most goodput, INVALID ones aside."""
    rated = cells[cells["verdict"] != "INVALID"].dropna(subset=["goodput_per_s"])
    if rated.empty:
        return "Unknown: no load's numbers hold."
    best = rated.sort_values("goodput_per_s").iloc[-1].to_dict()
    texts = [
        f"{_number(best, 'answered_per_s', '.2f')} answers/s",
        f"of them {_number(best, 'goodput_per_s', '.2f')} good" if isinstance(best["slo"], str) else "",
        f"{_number(best, 'output_tokens_per_s', ',.0f')} tokens/s",
    ]
    medians = [
        f"{name} {_number(best, f'{metric}_ms_p50', ',.1f')} ms"
        for metric, name in (("ttft", "first token"), ("itl", "gap between tokens (ITL)"), ("e2e", "whole"))
        if _number(best, f"{metric}_ms_p50", ",.1f")
    ]
    most = "" if len(cells) == 1 else " had the most goodput"
    told = f" Medians: {', '.join(medians)}." if medians else " The sample is too small for medians."
    return f"{best['cell_id']}{most}: {', '.join(filter(None, texts))}.{told}"


def _number(cell: dict[Any, Any], column: str, spec: str) -> str:
    return format_value(cell[column], spec)


def client_parts(result: Result) -> pd.DataFrame:
    """Split each answered request's time: cell_id, prompt_index, due_ms, phase and a column of ms per
    part."""
    requests = result.requests
    rows = requests[(requests["outcome"] == "ok") & requests["e2e_ms"].notna()]
    late = rows["send_lag_ms"].fillna(0.0).clip(lower=0.0, upper=rows["ttft_ms"])
    table = rows[["cell_id", "prompt_index", "due_ms", "phase"]].copy()
    values = (late, rows["ttft_ms"] - late, rows["e2e_ms"] - rows["ttft_ms"])
    for part, column in zip(PARTS, values, strict=True):
        table[part.name] = column
    return table


def client_shares(result: Result) -> list[dict[str, Any]]:
    parts = client_parts(result)
    sums = parts.loc[parts["phase"] == "measured", [part.name for part in PARTS]].sum()
    total = float(sums.sum())
    if not total > 0:
        return []
    return [
        {
            "share": round(float(sums[part.name]) / total, 4),
            "colour": part.colour,
            "text": f"{part.limit} {100 * float(sums[part.name]) / total:.0f}%",
            "tip": f"{part.limit}: {100 * float(sums[part.name]) / total:.1f}% of all requests' time\n"
            f"{part.meaning}",
        }
        for part in PARTS
    ]


def time_text(result: Result) -> str:
    parts = client_parts(result)
    measured = parts[parts["phase"] == "measured"]
    if measured.empty:
        return "Unknown: no measured request was answered."
    middle = {part: float(measured[part.name].median()) for part in PARTS}
    most = max(PARTS, key=lambda part: float(measured[part.name].sum()))
    told = ", ".join(f"{part.limit} {middle[part]:,.1f} ms" for part in PARTS)
    return (
        f"Mostly in {most.limit} ({most.meaning}). In the median request: {told}. A client cannot tell a "
        "server's queue from its prefill; the server's own metrics can."
    )


def needs_text(cells: pd.DataFrame) -> str:
    models, urls = (", ".join(dict.fromkeys(map(str, cells[name]))) for name in ("model", "url"))
    return (
        f"It needs the server at {urls}, serving {models}. Arrivals, lengths and prompts come from the seed: "
        "another bench with it sends the same, and `rayk report` of both folders compares them request by "
        "request."
    )


def client_waterfall(result: Result) -> dict[str, Any] | None:
    """Make the page's waterfall, each request from when it was due."""
    parts = client_parts(result)
    if parts.empty:
        return None
    labels = [f"request {index}" for index in parts["prompt_index"]]
    return waterfall(PARTS, parts.assign(label=labels), MAX_ROWS) | {"aligned": True}


def client_spreads(result: Result) -> list[Plot]:
    """Draw per metric the share of measured requests (of ITL: gaps) that took at most so long, a curve per
    load."""
    requests = result.requests
    measured = requests[(requests["phase"] == "measured") & (requests["outcome"] == "ok")]
    plots = []
    for metric in SPREADS:
        data = []
        for number, (cell_id, rows) in enumerate(measured.groupby("cell_id", sort=False)):
            values = sorted_values(rows[f"{metric}_ms"])
            colour, dash = PALETTE[number % len(PALETTE)], DASHES[number // len(PALETTE) % len(DASHES)]
            if len(values):
                data.append(curve(str(cell_id), values, colour, dash))
        if data:
            layout = spread_layout(metric, data)
            plots.append(Plot(id=f"spread-{metric}", title=metric.upper(), data=data, layout=layout))
    return plots
