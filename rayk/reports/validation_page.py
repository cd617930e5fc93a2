"""The report of a validation: how far off predictions are, cell by cell, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from rayk.reports.achieved import ACHIEVEMENTS, Achievement
from rayk.reports.page import Answer, Column, Page, Plot, Section
from rayk.reports.plan_answers import shell_lines
from rayk.reports.plots import LEGEND, PALETTE, SYMBOLS, log_axis, plain, round_values
from rayk.reports.trust import predicted_text
from rayk.reports.validation import Validation, Worst, metric_rows, worst_cell
from rayk.reports.values import format_value, is_null, plural

KINDS = {kind.name: kind for kind in ACHIEVEMENTS}
NUMBERED = 40  # cells whose numbers stand beside their marks; more would cover each other
ERRORS = (
    Column("metric", "title"),
    Column("cells", "num_cells", ",d"),
    Column("half are within", "median", ".1%"),
    Column("bound", "bound", ".0%"),
    Column("signed median", "signed", "+.1%"),
    Column("nine tenths within", "p90", ".1%"),
    Column("spread of repeats", "spread", ".1%"),
    Column("cells over the bound", "missed", ""),
    Column("worst", "worst", "+.1%"),
    Column("tau", "tau", ".2f"),
    Column("tau, told apart", "tau_apart", ".2f"),
)
NOTE = (
    "Predicted over measured, less 1: above 0 is predicted too long, or too much. A cell is predicted from "
    "its own arrivals, prompts and lengths of answers, repeat by repeat; numbers are means over repeats, and "
    "their spread is half the range of the repeats' own errors. A bound is missed where the error exceeds "
    "both it and twice the spread. The bound of a metric is for half of the cells."
)
TAU = (
    "Kendall's tau says whether predictions rank the cells as measurements do: 1 is alike, 0 is chance, -1 "
    "is in reverse. Told apart leaves out pairs of cells whose measured values lie within their spreads."
)
SCATTER = (
    "A mark per cell, predicted against measured; on the line they are equal, dotted lines are the bound. "
    "Numbers are those of the table below. Point at one for its name."
)
STAGES = (
    "Mean milliseconds per request in each stage, of the cells that are furthest off. Where a stage's share "
    "of the time differs, the model of that stage is at fault, or of what runs beside it."
)
QUEUE = "queue: requests that wait for room at a time, on average (Little's law)."
LINEAR = 4.0
WORST_CELLS = 3  # whose stages are listed


def validation_page(found: Validation) -> Page:
    rows = metric_rows(found.errors)
    cells = cell_rows(found.errors)
    missed = [row["title"] for row in rows if row["is_missed"]]
    worst = worst_cell(found)
    return Page(
        eyebrow="rayk plan --validate",
        name="validation",
        title=_title(rows, missed),
        lead=_lead(found, cells),
        chips=_chips(found, rows),
        stats=[
            (f"{len(cells):,}", "cells predicted"),
            (f"{int(found.errors['num_repeats'].max() or 0):,}", "repeats of each"),
            (f"{len(found.facts.get('left_out', ())):,}", "cells left out"),
        ],
        answers=_answers(found, rows, missed, worst),
        sections=[s for s in _sections(found, rows, cells) if s.rows or s.plots or s.items],
        environment=found.facts.get("environment", {}),
        footer="Tables: validation.parquet, validation_stages.parquet, and predicted runs, beside this file.",
    )


def _title(rows: Sequence[Mapping[str, Any]], missed: Sequence[str]) -> str:
    if missed:
        return f"{', '.join(missed)}: predictions are further off than the bound"
    if unsure := [row["title"] for row in rows if row["is_unsure"]]:
        return f"{', '.join(unsure)}: repeats differ too much to tell"
    judged = [row for row in rows if row["bound"] is not None and row["num_cells"]]
    return "Predictions are within their bounds" if judged else "No cell counts for a bound"


def _lead(found: Validation, cells: Sequence[Mapping[str, Any]]) -> str:
    runs = found.facts.get("runs", {})
    of = f"{plural(len(cells), 'cell')} of {plural(len(runs), 'run')}"
    return (
        f"{of}, held against predictions from the cost tables in {found.facts['predicted']['costs'] or '?'}."
    )


def _chips(found: Validation, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    chips = [
        (_tone(row), f"{row['title']} {row['median']:.1%} of {row['bound']:.0%}{_unsure(row)}")
        for row in rows
        if row["bound"] is not None and row["num_cells"]
    ]
    predicted = found.facts["predicted"]
    if predicted.get("unmeasured"):
        chips.append(("unmet", "UNMEASURED tables"))
    if found.errors["was_fitted"].any():
        chips.append(
            ("unmet", f"{found.errors[found.errors['was_fitted']]['cell_id'].nunique()} cells were fitted")
        )
    return chips


def _answers(
    found: Validation, rows: Sequence[Mapping[str, Any]], missed: Sequence[str], worst: Worst | None
) -> list[Answer]:
    judged = [row for row in rows if row["bound"] is not None and row["num_cells"]]
    far = "; ".join(
        f"{row['title']} {row['median']:.1%} (bound {row['bound']:.0%}{_unsure(row)})" for row in judged
    )
    is_unsure = any(row["is_unsure"] for row in rows)
    table = [
        ["", *(row["title"] for row in rows)],
        ["half are within", *(format_value(row["median"], ".1%") for row in rows)],
        ["signed median", *(format_value(row["signed"], "+.1%") for row in rows)],
        ["bound", *(format_value(row["bound"], ".0%") for row in rows)],
    ]
    return [
        Answer(
            question="How far off are predictions?",
            text=f"Half of the cells are within {far}." if judged else "No cell counts for a bound.",
            tone="unmet" if missed else "met" if judged and not is_unsure else "",
            table=table,
            note=QUEUE,
        ),
        Answer(
            question="Which cell is worst, and why?",
            text="" if worst is None else worst_text(worst),
            is_answered=worst is not None,
        ),
        Answer(question="Do they rank cells as measurements do?", text=_tau_text(rows)),
        Answer(question="What do they rest on?", text=_rests_on(found)),
        Answer(
            question="How do I run it again?",
            text="It predicts the measured cells again; nothing is run.",
            command=_command(found),
        ),
    ]


def _tone(row: Mapping[str, Any]) -> str:
    """Tell how a metric fares; of one that is neither kept nor missed, nothing."""
    return "unmet" if row["is_missed"] else "" if row["is_unsure"] else "met"


def _unsure(row: Mapping[str, Any]) -> str:
    """Say of an error over its bound why that is not missed."""
    return f", but repeats differ by {row['spread']:.0%}" if row["is_unsure"] else ""


def worst_text(worst: Worst) -> str:
    """Name the worst cell, and the stage that explains it."""
    kind = KINDS[worst.metric]
    text = f"{worst.cell_id}: its {kind.title} is predicted {worst.error:+.1%} off, bound {worst.bound:.0%}."
    if not worst.stage:
        return f"{text} Its requests have no stage times."
    return (
        f"{text} The stage whose share differs most is {worst.stage}: {worst.predicted_share:.0%} of the "
        f"time predicted ({worst.predicted_ms:,.2f} ms), {worst.measured_share:.0%} measured "
        f"({worst.measured_ms:,.2f} ms)."
    )


def validation_lines(found: Validation) -> list[str]:
    """Say in a few lines what the page says first."""
    lines = []
    for row in metric_rows(found.errors):
        if not row["num_cells"]:
            continue
        bound = "" if row["bound"] is None else f", bound {row['bound']:.0%}"
        missed = " MISSED" if row["is_missed"] else _unsure(row)
        lines.append(
            f"{row['title']}: half of {row['num_cells']:,} cells within {row['median']:.1%}{bound}{missed}"
            f" (signed {row['signed']:+.1%}, worst {row['worst']:+.1%}, tau {row['tau']:.2f})"
        )
    worst = worst_cell(found)
    left_out = found.facts.get("left_out", ())
    return [
        *lines,
        *([] if worst is None else [f"worst cell: {worst_text(worst)}"]),
        *(f"left out: {cell_id}: {why}" for cell_id, why in left_out),
        *_not_noted(found),
    ]


def _not_noted(found: Validation) -> list[str]:
    why = found.facts.get("not_noted")
    return [f"Plans will not tell of this: it could not be kept with the tables ({why})."] if why else []


def is_missed(found: Validation) -> bool:
    """Tell whether any bound is."""
    return any(row["is_missed"] for row in metric_rows(found.errors))


def _tau_text(rows: Sequence[Mapping[str, Any]]) -> str:
    told = [f"{row['title']} {row['tau']:.2f}" for row in rows if not is_null(row["tau"])]
    return f"Kendall's tau: {', '.join(told)}; 1 is alike, 0 is chance." if told else "One cell has no order."


def _rests_on(found: Validation) -> str:
    about = found.facts.get("provenance", {})
    measured = ", ".join(str(about[name]) for name in ("cpu", "machine", "date") if about.get(name))
    texts = [predicted_text(found.facts["predicted"])]
    if measured:
        texts.append(f"The tables were measured on {measured}, in {about.get('fitted cells', 0)} cells.")
    if found.errors["was_fitted"].any():
        texts.append("Cells that the tables were fitted to are marked, and count for no bound.")
    if left_out := found.facts.get("left_out"):
        texts.append(f"{plural(len(left_out), 'cell')} could not be predicted (below).")
    return " ".join([*texts, *_not_noted(found)])


def _command(found: Validation) -> str:
    runs = " ".join(f"--validate {run}" for run in found.facts.get("runs", {}))
    extras = " --include-fitted" if found.errors["was_fitted"].any() else ""
    slos = [text for text in dict.fromkeys(found.errors["slo"]) if text]
    limits = f" --slo {slos[0]}" if len(slos) == 1 else ""
    costs = found.facts["predicted"]["costs"]
    return shell_lines(f"rayk plan {runs} --costs {costs}{limits}{extras}")


# --- sections -------------------------------------------------------------------------------------


def _sections(
    found: Validation, rows: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]
) -> list[Section]:
    left_out = found.facts.get("left_out", ())
    return [
        Section(
            title="Predicted against measured",
            note=SCATTER,
            plots=[plot for kind in ACHIEVEMENTS if (plot := _scatter(found.errors, kind)) is not None],
        ),
        Section(
            title="Errors by metric", note=f"{NOTE}\n{TAU}\n{QUEUE}", columns=ERRORS, rows=shown_metrics(rows)
        ),
        Section(
            title="Errors by cell",
            note="In percent, signed; a cell with a star was fitted. In brackets: the measured value.",
            columns=cell_columns(),
            rows=cells,
        ),
        Section(
            title="Stages of the worst cells",
            note=STAGES,
            columns=(
                Column("cell_id", "cell_id"),
                Column("stage", "stage"),
                Column("measured ms", "measured_ms", ",.2f"),
                Column("predicted ms", "predicted_ms", ",.2f"),
                Column("measured share", "measured_share", ".1%"),
                Column("predicted share", "predicted_share", ".1%"),
            ),
            rows=_stage_rows(found),
        ),
        Section(
            title="Left out",
            note="Cells that are not predicted.",
            items=[(str(cell_id), [str(why)]) for cell_id, why in left_out],
        ),
    ]


def shown_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Say of `metric_rows` how many cells miss the bound, as ERRORS shows it."""
    return [
        {**row, "missed": f"{row['num_missed']} of {row['num_cells']}" if row["bound"] else ""}
        for row in rows
    ]


def cell_columns() -> list[Column]:
    return [
        Column("#", "number", "d"),
        Column("cell_id", "cell_id"),
        *(
            Column(f"{kind.title} %", kind.name, "+.1f", beside=f"{kind.name}/measured")
            for kind in ACHIEVEMENTS
        ),
        Column("good is", "slo", is_under_first=True),
    ]


def numbers(errors: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Number the cells in their order: (run, cell) -> its number."""
    pairs = dict.fromkeys(zip(errors["run"], errors["cell_id"], strict=True))
    return {pair: number for number, pair in enumerate(pairs, start=1)}


def cell_rows(errors: pd.DataFrame) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    count = numbers(errors)
    for row in errors.to_dict("records"):
        pair = row["run"], row["cell_id"]
        star = " *" if row["was_fitted"] else ""
        of_cell = found.setdefault(
            pair,
            {"number": count[pair], "cell_id": f"{row['cell_id']}{star}", "slo": row["slo"]},
        )
        kind = KINDS[row["metric"]]
        of_cell[kind.name] = None if is_null(row["error"]) else 100 * row["error"]
        of_cell[f"{kind.name}/measured"] = format_value(row["measured"], kind.spec)
    return list(found.values())


def _stage_rows(found: Validation) -> list[dict[str, Any]]:
    """List the stages of the cells whose errors are the largest by their bounds."""
    counted = found.errors[found.errors["bound"].notna() & found.errors["error"].notna()]
    ratio = (counted["error"].abs() / counted["bound"]).groupby([counted["run"], counted["cell_id"]]).max()
    rows: list[dict[str, Any]] = []
    for run, cell_id in ratio.sort_values(ascending=False).index[:WORST_CELLS]:
        stages = found.stages[(found.stages["run"] == run) & (found.stages["cell_id"] == cell_id)]
        sums = stages[["measured_ms", "predicted_ms"]].sum()
        rows += [
            {
                **row,
                "measured_share": row["measured_ms"] / sums["measured_ms"],
                "predicted_share": row["predicted_ms"] / sums["predicted_ms"],
            }
            for row in stages.to_dict("records")
        ]
    return rows


def _scatter(errors: pd.DataFrame, kind: Achievement) -> Plot | None:
    """Draw a metric's cells; those at 0 have no place on logarithmic axes, and are left out."""
    of_metric = errors[errors["metric"] == kind.name]
    shown = of_metric[(of_metric["measured"] > 0) & (of_metric["predicted"] > 0)]
    if shown.empty:
        return None
    values = pd.concat([shown["measured"], shown["predicted"]])
    low, high = float(values.min()) / 1.15, float(values.max()) * 1.15
    bound = shown["bound"].dropna().max()
    lines = [(1.0, "solid")]
    if not is_null(float(bound)):
        lines += [(1 + bound, "dot"), (1 / (1 + bound), "dot")]
    data = [_line(low, high, factor, dash) for factor, dash in lines]
    data += _marks(shown, kind, numbers(errors))
    axes = {side: _axis(f"{side}, {kind.unit}", low, high) for side in ("measured", "predicted")}
    layout = {
        "height": 400,
        "showlegend": len(set(shown["run"])) > 1,
        "legend": LEGEND,
        "xaxis": axes["measured"],
        "yaxis": axes["predicted"],
    }
    return Plot(id=f"against-{kind.name}", title=f"{kind.title}, {kind.unit}", data=data, layout=layout)


def _marks(
    shown: pd.DataFrame, kind: Achievement, count: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    is_numbered = len(shown) <= NUMBERED
    traces = []
    for index, (run, rows) in enumerate(shown.groupby("run", sort=False)):
        told = [
            f"{count[str(run), str(cell_id)]}: {cell_id}<br>{error:+.1%}, repeats ±{spread:.1%}"
            for cell_id, error, spread in zip(rows["cell_id"], rows["error"], rows["spread"], strict=True)
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text" if is_numbered else "markers",
                "name": plain(run),
                "x": rows["measured"].tolist(),
                "y": rows["predicted"].tolist(),
                "text": [str(count[str(run), str(cell_id)]) for cell_id in rows["cell_id"]],
                "textposition": "top center",
                "textfont": {"size": 10},
                "customdata": told,
                "hovertemplate": f"%{{customdata}}<br>measured %{{x:.4g}}, predicted %{{y:.4g}} {kind.unit}"
                "<extra></extra>",
                "marker": {
                    "size": 8,
                    "opacity": 0.8,
                    "color": PALETTE[index % len(PALETTE)],
                    "symbol": SYMBOLS[index % len(SYMBOLS)],
                },
            }
        )
    return traces


def _line(low: float, high: float, factor: float, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high],
        "y": [low * factor, high * factor],
        "line": {"color": "soft", "width": 1.2, "dash": dash},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Make an axis, linear over less than LINEAR times the lowest value: ticks of a logarithm lie too far
    apart there."""
    if high < LINEAR * low:
        return {"title": {"text": title}, "range": [low, high]}
    ends = [math.log10(low), math.log10(high)]
    return log_axis(title, round_values(low, high)) | {"range": ends}
