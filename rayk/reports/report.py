"""Make the report of a folder, of a run or of a bench."""

from __future__ import annotations

from pathlib import Path

from rayk.reports.html import write_page
from rayk.reports.load_fields import is_load
from rayk.reports.load_page import load_page
from rayk.reports.markdown import page_markdown
from rayk.reports.page import Page
from rayk.reports.result import Result, load
from rayk.reports.run_page import run_page


def report_page(result: Result) -> Page:
    return load_page(result) if is_load(result.cells) else run_page(result)


def write_html(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write a folder's report (default: DIR/report.html) and return its path. Raises UserError without
    tables."""
    path = Path(out) if out is not None else Path(directory) / "report.html"
    return write_page(report_page(load(directory)), path)


def markdown(result: Result) -> str:
    return page_markdown(report_page(result))
