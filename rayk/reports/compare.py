"""Two or more runs beside each other, cell by cell; the first run is the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from rayk.reports.files import write_text
from rayk.reports.html import assets, template
from rayk.reports.result import Result
from rayk.reports.text import markdown_table
from rayk.reports.verdicts import format_value, headline

METRICS = (
    ("GB/s", "transfer_gb_per_s", ".3g"),
    ("TTFT ms", "ttft_ms_p50", ".1f"),
    ("TPOT ms", "tpot_ms_p50", ".2f"),
    ("tokens/s", "output_tokens_per_s", ".1f"),
    ("wall s", "wall_s", ".1f"),
)
"""(title, column of cells.parquet, format) of what is compared."""


def labels(results: list[Result]) -> list[str]:
    """Short distinct names of the runs: folder names, numbered where equal."""
    names = [r.directory.name if r.directory else f"run {i}" for i, r in enumerate(results)]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({i + 1})" for i, name in enumerate(names)]


def compare(results: list[Result]) -> pd.DataFrame:
    """One row per cell of any run: `verdict/<run>` and `<column>/<run>` columns, NaN where absent."""
    tables = []
    for label, result in zip(labels(results), results, strict=True):
        columns = ["cell_id", "verdict", *(column for _, column, _ in METRICS)]
        table = result.cells[columns].set_index("cell_id")
        tables.append(table.add_suffix(f"/{label}"))
    joined = pd.concat(tables, axis=1)
    order = dict.fromkeys(cell for r in results for cell in r.cells["cell_id"])
    return joined.reindex(list(order)).rename_axis("cell_id").reset_index()


def verdict_changes(results: list[Result]) -> int:
    """Cells whose verdict is not the same in every run (absent counts as a difference)."""
    columns = [f"verdict/{label}" for label in labels(results)]
    verdicts = compare(results)[columns].fillna("absent").to_numpy().tolist()
    return sum(len(set(row)) > 1 for row in verdicts)


def compare_headline(results: list[Result]) -> str:
    """One line: how many verdicts differ."""
    count = verdict_changes(results)
    total = len(compare(results))
    return f"{count} of {total} cells differ in verdict" if count else f"{total} cells, equal verdicts"


def compare_markdown(results: list[Result]) -> str:
    """The comparison as GitHub Markdown."""
    head, rows = _table(results)
    runs = [
        f"- {label}: {headline(result.cells)}" for label, result in zip(labels(results), results, strict=True)
    ]
    texts = [[cell["text"] for cell in row] for row in rows]
    title = f"# {compare_headline(results)}"
    return "\n".join([title, "", *runs, "", *markdown_table([t for t, _ in head], texts), ""])


def write_compare_html(results: list[Result], path: Path) -> Path:
    """The comparison as one self-contained HTML file."""
    head, rows = _table(results)
    runs = [
        {
            "label": label,
            "headline": headline(result.cells),
            "about": " · ".join(
                str(x)
                for x in (
                    result.directory,
                    result.environment.get("started"),
                    result.environment.get("git_commit"),
                )
                if x
            ),
        }
        for label, result in zip(labels(results), results, strict=True)
    ]
    text = template("compare.html.j2").render(
        **assets(),
        headline=compare_headline(results),
        runs=runs,
        table={"head": head, "rows": rows},
    )
    write_text(path, text)
    return path


def _table(results: list[Result]) -> tuple[list[tuple[str, bool]], list[list[dict[str, Any]]]]:
    """Head (title, numeric) and rows of the comparison, each metric's runs side by side."""
    names = labels(results)
    head = [("cell", False), *((f"verdict, {name}", False) for name in names)]
    head += [(f"{title}, {name}", True) for title, _, _ in METRICS for name in names]
    rows = []
    for record in compare(results).to_dict(orient="records"):
        row = [_cell(record["cell_id"], kind="name mono")]
        for name in names:
            verdict = record[f"verdict/{name}"]
            known = isinstance(verdict, str)
            row.append(_cell(verdict if known else "absent", chip=verdict if known else ""))
        for _, column, spec in METRICS:
            values = [record[f"{column}/{name}"] for name in names]
            row += [_metric_cell(value, values[0], spec, i) for i, value in enumerate(values)]
        rows.append(row)
    return head, rows


def _cell(text: str, *, kind: str = "", chip: str = "", value: float | None = None) -> dict[str, Any]:
    return {"text": text, "kind": kind, "chip": chip, "value": value}


def _metric_cell(value: float, base: float, spec: str, index: int) -> dict[str, Any]:
    """A number, and how it differs from the first run's."""
    text = format_value(value, spec)
    if not text:
        return _cell("", kind="num")
    if index and base == base and base:
        text += f" ({100 * (value / base - 1):+.0f}%)"
    return _cell(text, kind="num", value=float(value))
