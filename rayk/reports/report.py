"""Make the report of a folder: of a run or a bench, or of a job or command that has tables of its own."""

from __future__ import annotations

from pathlib import Path

from rayk.reports.files import read_spec
from rayk.reports.gpu_day import gpu_day_page, is_gpu_day
from rayk.reports.html import write_page
from rayk.reports.load_fields import is_load
from rayk.reports.load_page import load_page
from rayk.reports.markdown import page_markdown
from rayk.reports.page import Page
from rayk.reports.plan_page import plan_page
from rayk.reports.plans import is_plan, read_plans
from rayk.reports.result import Result, load
from rayk.reports.run_page import run_page
from rayk.reports.validation import is_validation, read_validation
from rayk.reports.validation_page import validation_page


def report_page(result: Result) -> Page:
    return load_page(result) if is_load(result.cells) else run_page(result)


def has_own_page(folder: str | Path) -> bool:
    """Tell whether a folder is of neither a run nor a bench: of a GPU day, a validation or a plan."""
    return is_gpu_day(Path(folder)) or is_validation(folder) or is_plan(folder)


def folder_page(folder: str | Path) -> Page:
    """Make a folder's page. Raises UserError without tables."""
    if is_gpu_day(Path(folder)):
        return gpu_day_page(Path(folder))
    if is_validation(folder):
        return validation_page(read_validation(folder))
    if is_plan(folder):
        found = read_plans(folder)
        return plan_page(found.plans, found.facts, read_spec(Path(folder) / "spec.yaml"))
    return report_page(load(folder))


def write_html(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write a folder's report (default: DIR/report.html) and return its path. Raises UserError without
    tables."""
    path = Path(out) if out is not None else Path(directory) / "report.html"
    return write_page(folder_page(directory), path)


def markdown(result: Result) -> str:
    return page_markdown(report_page(result))
