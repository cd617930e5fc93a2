"""Reports as Markdown."""

from __future__ import annotations

from rayk.reports.grids import verdict_grids
from rayk.reports.load_page import load_markdown
from rayk.reports.load_tables import is_load
from rayk.reports.md_table import escaped, markdown_table
from rayk.reports.result import Result
from rayk.reports.staging import COLUMNS, staging_records
from rayk.reports.summary_text import answer_lines, limit_lines, pair_lines
from rayk.reports.values import format_value
from rayk.reports.verdicts import headline, table_rows, told_columns


def markdown(result: Result) -> str:
    """Headline, verdict matrices and cells as GitHub Markdown; of a bench its rates and latencies."""
    if is_load(result.cells):
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
