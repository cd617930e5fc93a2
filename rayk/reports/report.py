"""The report of a folder, of a run or of a bench."""

from __future__ import annotations

from pathlib import Path

from rayk.reports.files import write_text
from rayk.reports.html import render, write_page
from rayk.reports.load_page import load_page
from rayk.reports.load_tables import is_load
from rayk.reports.result import load


def write_html(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run's folder (default: DIR/report.html) and return its path.

    Raises UserError when the folder has no tables.
    """
    result = load(directory)
    path = Path(out) if out is not None else Path(directory) / "report.html"
    if is_load(result.cells):
        write_page(load_page(result), path)
    else:
        write_text(path, render(result))
    return path
