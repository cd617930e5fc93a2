"""Two or more runs beside each other, cell by cell; the first run is the base."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from rayk.reports.compare_tables import TextTable, as_errors, doubt_section, paired_sections, summary
from rayk.reports.differences import differences_of
from rayk.reports.files import atomic_path, parse_spec
from rayk.reports.folder import FACTS, changed_facts, differences, flatten
from rayk.reports.html import write_page
from rayk.reports.load_fields import is_load
from rayk.reports.load_page import TONES
from rayk.reports.markdown import page_markdown
from rayk.reports.page import Column, Page, Section
from rayk.reports.result import Result
from rayk.reports.trust import is_predicted, probe_rows
from rayk.reports.values import plural
from rayk.reports.verdicts import headline, tone

METRICS = (
    ("GB/s", "transfer_gb_per_s", ".3g"),
    ("TTFT ms", "ttft_ms_p50", ".1f"),
    ("TPOT ms", "tpot_ms_p50", ".2f"),
    ("tokens/s", "output_tokens_per_s", ".1f"),
    ("wall s", "wall_s", ".1f"),
)
"""(title, column of cells.parquet, format) of what is compared."""
LOAD_METRICS = (
    ("goodput/s", "goodput_per_s", ".2f"),
    ("good %", "good_share", ".1%"),
    ("TTFT ms", "ttft_ms_p50", ".1f"),
    ("TPOT ms", "tpot_ms_p50", ".2f"),
    ("E2E ms", "e2e_ms_p50", ".1f"),
    ("tokens/s", "output_tokens_per_s", ".1f"),
    ("failed", "num_failed", "d"),
    ("wall s", "wall_s", ".1f"),
)
ABSENT = "absent"
MAX_DIFFERENCES = 8  # columns with unlike values that are named per run


def labels(results: list[Result]) -> list[str]:
    names = [r.directory.name if r.directory else f"run {i}" for i, r in enumerate(results)]
    forecast = [", predicted" if is_predicted(r.environment) else "" for r in results]
    names = [name + suffix for name, suffix in zip(names, forecast, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({i + 1})" for i, name in enumerate(names)]


def compared_metrics(results: list[Result]) -> tuple[tuple[str, str, str], ...]:
    return LOAD_METRICS if all(is_load(result.cells) for result in results) else METRICS


def compare(results: list[Result]) -> pd.DataFrame:
    """Join the runs' cells, a row per cell of any run, NaN where a run has none. Columns: `changed` (the
    verdict differs; PREDICTED does from none), `missing` (some run lacks the cell), `verdict/<run>`,
    `<column>/<run>`, and `<column>/<run>/ratio` to the first run."""
    names, metrics = labels(results), compared_metrics(results)
    tables = []
    for name, result in zip(names, results, strict=True):
        columns = ["cell_id", "verdict", *(column for _, column, _ in metrics)]
        table = result.cells.reindex(columns=columns).set_index("cell_id")
        tables.append(table.add_suffix(f"/{name}"))
    joined = pd.concat(tables, axis=1)
    order = dict.fromkeys(cell for r in results for cell in r.cells["cell_id"])
    joined = joined.reindex(list(order)).rename_axis("cell_id").reset_index()
    verdicts = joined[[f"verdict/{name}" for name in names]].fillna(ABSENT).to_numpy().tolist()
    joined.insert(1, "changed", [len({*row} - {ABSENT, "PREDICTED"}) > 1 for row in verdicts])
    joined.insert(2, "missing", [ABSENT in row for row in verdicts])
    for _, column, _ in metrics:
        base = joined[f"{column}/{names[0]}"].where(lambda values: values != 0)
        for name in names[1:]:
            joined[f"{column}/{name}/ratio"] = joined[f"{column}/{name}"] / base
    return joined


def compare_headline(results: list[Result]) -> str:
    table = compare(results)
    changed, missing = int(table["changed"].sum()), int(table["missing"].sum())
    noun = "load" if all(is_load(result.cells) for result in results) else "cell"
    if changed:
        text = f"{changed} of {plural(len(table), noun)} {'differs' if changed == 1 else 'differ'} in verdict"
    elif 0 < len(_predicted(results)) < len(results) and missing < len(table):
        text = f"{plural(len(table) - missing, noun)} measured and predicted"
    elif missing < len(table):
        text = f"{plural(len(table) - missing, noun)} in every run, equal verdicts"
    else:
        text = f"no {noun} is in every run"
    return text + (f", {missing} in some runs only" if missing else "")


def _predicted(results: list[Result]) -> list[Result]:
    return [result for result in results if is_predicted(result.environment)]


def write_compare_csv(results: list[Result], path: Path) -> Path:
    with atomic_path(path) as temporary:
        compare(results).to_csv(temporary, index=False)
    return path


def compare_markdown(results: list[Result]) -> str:
    return page_markdown(compare_page(results))


def write_compare_html(results: list[Result], path: Path) -> Path:
    return write_page(compare_page(results), path)


def compare_page(results: list[Result]) -> Page:
    found = sections(results)
    return Page(
        eyebrow=f"rayk · {len(results)} runs compared",
        name=f"rayk: {len(results)} runs compared",
        title=compare_headline(results),
        lead=summary(found),
        sections=[
            Section(title="Runs", items=_runs(results)),
            *(table.section() for table in found),
            _cells(results),
        ],
    )


def sections(results: list[Result]) -> list[TextTable]:
    names = labels(results)
    table = compare(results)
    verdicts = table[[f"verdict/{name}" for name in names]].fillna(ABSENT)
    rows = [[cell, *row] for cell, row in zip(table["cell_id"], verdicts.to_numpy().tolist(), strict=True)]
    tones = _tones(results)
    absent = [row for row, missing in zip(rows, table["missing"], strict=True) if missing]
    changed = [
        [*row, _reason(results, row[0])]
        for row, differs in zip(rows, table["changed"], strict=True)
        if differs
    ]

    def section(title: str, note: str, head: list[str], rows: list[list[str]]) -> TextTable:
        chips = [[of_run.get(row[0], "") for of_run in tones] for row in rows]
        return TextTable(title=title, note=note, head=head, rows=rows, chips=chips)

    found = doubt_section(results, names)
    if changed:
        note = "The reason is that of the last run that has one."
        found.append(section("Changed verdicts", note, ["cell_id", *names, "reason"], changed))
    if absent:
        note = "Not in every run: another matrix, or a run that was interrupted."
        found.append(section("Cells of some runs only", note, ["cell_id", *names], absent))
    paired = paired_sections(results, names)
    found += as_errors(paired) if _predicted(results) else paired
    medians = _medians(table, names, compared_metrics(results))
    if medians:
        note = f"Median over the cells of the ratio to {names[0]}, and the middle half of the ratios."
        head = ["", *names[1:], "cells"]
        found.append(TextTable(title="Times over all cells", note=note, head=head, rows=medians))
    return found + _environment_section(results)


def _environment_section(results: list[Result]) -> list[TextTable]:
    facts = [dict(flatten({k: r.environment.get(k) for k in FACTS})) for r in results]
    rows = []
    for key in dict.fromkeys(key for of_run in facts for key in of_run):
        values = ["none" if of_run.get(key) is None else str(of_run[key]) for of_run in facts]
        if len(set(values)) > 1:
            rows.append([key, *values])
    rows += probe_rows([result.environment for result in results])
    note = "Facts that differ, all others are equal; and what the machine did, which differs from run to run."
    return [TextTable(title="Environment", note=note, head=["", *labels(results)], rows=rows)] if rows else []


def _tones(results: list[Result]) -> list[dict[str, str]]:
    found = []
    for result in results:
        tones = {r["cell_id"]: tone(r) for r in result.cells.to_dict(orient="records")}
        found.append({cell: TONES.get(of, of) for cell, of in tones.items()})
    return found


def _medians(
    table: pd.DataFrame, names: list[str], metrics: tuple[tuple[str, str, str], ...]
) -> list[list[str]]:
    rows = []
    for title, column, _ in metrics:
        ratios = [table[f"{column}/{name}/ratio"].dropna() for name in names[1:]]
        if any(len(r) for r in ratios):
            counts = dict.fromkeys(str(len(r)) for r in ratios)
            rows.append([title, *(_spread(r) for r in ratios), ", ".join(counts)])
    return rows


def _spread(ratios: pd.Series) -> str:
    if not len(ratios):
        return ""
    low, middle, high = ratios.quantile([0.25, 0.5, 0.75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _reason(results: list[Result], cell: str) -> str:
    reasons = [r.cells.loc[r.cells["cell_id"] == cell, "reason"] for r in results]
    texts = [text for reason in reasons for text in reason if isinstance(text, str) and text]
    return texts[-1] if texts else ""


def _runs(results: list[Result]) -> list[tuple[str, list[str]]]:
    found = []
    for i, (label, result) in enumerate(zip(labels(results), results, strict=True)):
        facts = (result.directory, result.environment.get("started"), result.environment.get("git_commit"))
        about = [headline(result.cells, num_missing=result.num_missing), *(str(f) for f in facts if f)]
        notes = [*_invalid(result), *(_notes(results[0], result) if i else [])]
        found.append((label, [" · ".join(about), *notes]))
    return found


def _invalid(result: Result) -> list[str]:
    if not is_load(result.cells):
        return []
    rows = result.cells[result.cells["verdict"] == "INVALID"].to_dict(orient="records")
    return [f"INVALID, its numbers do not hold: {row['cell_id']}: {row['reason']}" for row in rows]


def _notes(base: Result, other: Result) -> list[str]:
    specs = [parse_spec(r.spec_yaml) for r in (base, other)]
    for spec in specs:
        spec.pop("name", None)
    notes = []
    if changed := differences(*specs):
        notes.append(f"another spec: {', '.join(changed)}")
    if changed := changed_facts(base.environment, other.environment):
        notes.append(f"other versions or another machine: {', '.join(changed)}")
    if is_load(base.cells) and is_load(other.cells):
        return notes  # whatever they measured differs
    if _predicted([base, other]):
        return [*notes, "predicted: what differs are errors; rayk plan --validate judges them by bounds"]
    found = differences_of(base, other)
    notes += [f"values differ: {difference}" for difference in found[:MAX_DIFFERENCES]]
    if len(found) > MAX_DIFFERENCES:
        notes.append(f"values differ in {len(found) - MAX_DIFFERENCES} more columns")
    if not found and set(base.cells["cell_id"]) & set(other.cells["cell_id"]):
        notes.append("equal tables in the cells both have, times and nodes aside")
    return notes


def _cells(results: list[Result]) -> Section:
    names, table = labels(results), compare(results)
    metrics = [
        m
        for m in compared_metrics(results)
        if table[[f"{m[1]}/{name}" for name in names]].notna().any(axis=None)
    ]
    columns = [Column("cell_id", "cell_id")]
    columns += [Column(f"verdict, {name}", f"verdict/{name}", tone=f"tone/{name}") for name in names]
    columns += [
        Column(f"{title}, {name}", f"{key}/{name}", spec, beside=f"change {key}/{name}")
        for title, key, spec in metrics
        for name in names
    ]
    tones = _tones(results)
    rows = []
    for record in table.to_dict(orient="records"):
        row = {"cell_id": record["cell_id"]}
        for name, of_run in zip(names, tones, strict=True):
            verdict = record[f"verdict/{name}"]
            row[f"verdict/{name}"] = verdict if isinstance(verdict, str) else ABSENT
            row[f"tone/{name}"] = of_run.get(record["cell_id"], "")
        for _, key, _ in metrics:
            base = record[f"{key}/{names[0]}"]
            for name in names:
                row[f"{key}/{name}"] = value = record[f"{key}/{name}"]
                is_compared = name != names[0] and base == base and base and value == value
                row[f"change {key}/{name}"] = f"{100 * (value / base - 1):+.0f}%" if is_compared else ""
        rows.append(row)
    return Section(
        title="Cells",
        note="Percentages are against the first run.",
        hint="Click a column's name to sort by it.",
        columns=columns,
        rows=rows,
    )
