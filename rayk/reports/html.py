"""Write a page as one self-contained HTML file that works offline, in light and dark, wide and narrow."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from rayk.reports.files import write_text
from rayk.reports.page import Column, Page, Section, cell_text
from rayk.reports.trust import doubt_text

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"  # others' code, with its licence
SHORT_TEXT = 24  # a cell's text of no more characters stands on one line
SCRIPTS = ("report.js", "waterfall.js")


def write_page(page: Page, path: Path) -> Path:
    write_text(path, page_html(page))
    return path


def page_html(page: Page) -> str:
    plots = [
        {"id": plot.id, "data": plot.data, "layout": plot.layout}
        for section in page.sections
        for plot in section.plots
    ]
    waterfalls = [dict(section.waterfall) for section in page.sections if section.waterfall]
    environment = Section(title="Environment", is_folded=True, items=_items(page.environment))
    sections = [section for section in page.sections if not section.is_folded]
    sections += [environment] if environment.items else []
    sections += [section for section in page.sections if section.is_folded]
    return _template().render(
        css=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        js="".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS),
        page=page,
        doubt=doubt_text(page.environment),
        sections=[(section, _grids(section), _table(section)) for section in sections],
        plots_json=script_json(plots),
        waterfall_json=script_json(waterfalls[0]) if waterfalls else "",
        plotly_js=plotly_js() if plots or waterfalls else "",
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(loader=loader, autoescape=True, **options).get_template("page.html.j2")


def _grids(section: Section) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(key, list(grids)) for key, grids in groupby(section.grids, lambda grid: grid.get("heading", ""))]


def _table(section: Section) -> dict[str, Any] | None:
    columns = [column for column in section.columns if not column.is_under_first]
    under = [column for column in section.columns if column.is_under_first]
    rows = []
    for row in section.rows:
        cells = [_cell(row, column) for column in columns]
        why = " ".join(cell_text(row, column) for column in under)
        cells[0] |= {"why": why, "is_bad": any(cell["chip"] == "unmet" for cell in cells)}
        rows.append(cells)
    return {"columns": columns, "rows": rows} if columns else None


def _cell(row: Mapping[str, Any], column: Column) -> dict[str, Any]:
    value = row[column.key]
    text = cell_text(row, column)
    if column.spec:
        kind = "num"
    elif column.key == "cell_id":
        kind = "name mono"
    else:
        kind = "" if column.tone else "short" if len(text) <= SHORT_TEXT else "reason"
    is_number = bool(column.spec and text) and not isinstance(value, str)
    return {
        "text": text,
        "value": float(value) if is_number else None,
        "kind": kind,
        "chip": row[column.tone] if column.tone else "",
    }


def script_json(data: object) -> str:
    """Write JSON that is safe inside a <script> element; NaN becomes null."""
    return json.dumps(_no_nan(data), allow_nan=False).replace("<", "\\u003c")


def _no_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _no_nan(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_no_nan(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def plotly_js() -> str:
    """Read plotly.js (npm's plotly.js-cartesian-dist-min, a third of the whole), so that a page works
    offline."""
    return (VENDOR / "plotly-cartesian.min.js").read_text(encoding="utf-8")


def _items(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, list[str]]]:
    """Flatten environment.json in its order; nested names are joined."""
    items: list[tuple[str, list[str]]] = []
    for key, value in environment.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            items += _items(value, f"{name} ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, item in enumerate(value, start=1):
                items += _items(item, f"{name} {number} ")
        elif isinstance(value, list):
            items.append((name, [" ".join(map(str, value)) if value else "none"]))
        else:
            items.append((name, ["none" if value is None else str(value)]))
    return items
