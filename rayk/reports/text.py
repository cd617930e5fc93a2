"""Reports as Markdown and CSV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.files import TABLES, atomic_path
from rayk.reports.grids import verdict_grids
from rayk.reports.load_tables import is_load
from rayk.reports.md_table import escaped, markdown_table
from rayk.reports.result import Result
from rayk.reports.staging import COLUMNS, staging_records
from rayk.reports.summary_text import answer_lines, limit_lines, pair_lines
from rayk.reports.verdicts import format_value, headline, table_rows, told_columns


def markdown(result: Result) -> str:
    """Headline, verdict matrices and cells as GitHub Markdown; of a bench its rates and latencies."""
    if is_load(result.cells):
        from rayk.reports.load_page import load_markdown  # which takes its tables from here

        return load_markdown(result.cells)
    lines = [f"# {headline(result.cells, num_missing=result.num_missing)}", ""]
    lines += answer_lines(result)
    for grid in verdict_grids(result.cells):
        lines += [f"## {escaped(grid['title'])}", ""]
        rows = [[label, *(_grid_text(c) for c in cells)] for label, cells in grid["rows"]]
        lines += [*markdown_table([grid["corner"], *grid["columns"]], rows), ""]
    lines += [*pair_lines(result), *limit_lines(result)]
    titles = [title for title, _, _ in told_columns(result.cells)]
    choices = staging_records(result.cells, result.transfers)
    if choices:
        rows = [[format_value(record[column], spec) for _, column, spec in COLUMNS] for record in choices]
        lines += ["## Staging", "", *markdown_table([title for title, _, _ in COLUMNS], rows), ""]
    lines += ["## Cells", "", *markdown_table(titles, table_rows(result.cells)), ""]
    return "\n".join(lines)


def _grid_text(cell: dict[str, str] | None) -> str:
    return "" if cell is None else cell["verdict"]


def write_csv(result: Result, directory: Path) -> list[Path]:
    """Write cells.csv, requests.csv and transfers.csv; lists and structs as JSON texts."""
    paths = []
    for name in TABLES:
        path = directory / f"{name}.csv"
        with atomic_path(path) as temporary:
            csv_frame(getattr(result, name)).to_csv(temporary, index=False)
        paths.append(path)
    return paths


def csv_frame(table: pd.DataFrame) -> pd.DataFrame:
    """A copy whose lists and structs are JSON texts."""
    table = table.copy()
    for column in table.columns:
        if table[column].dtype == object:
            table[column] = table[column].map(_csv_value)
    return table


def _csv_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return json.dumps(value) if isinstance(value, list | dict) else value
