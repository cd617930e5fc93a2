"""Reports of jobs that are no experiment: tables as files, and a page of sections like a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rayk.reports.answers import Answer
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.html import assets, environment_items, plotly_js, script_json, template
from rayk.reports.text import csv_frame
from rayk.reports.trust import doubt_text
from rayk.reports.verdicts import format_value
from rayk.types.errors import UserError

SHORT_TEXT = 24
"""A cell's text of no more characters stands on one line."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A Plotly figure as plain data; see `plots.py` for the words that stand for the page's colours."""

    id: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a page's table, and of its Markdown."""

    title: str
    key: str
    spec: str = ""
    """How numbers are written (a format spec); texts have none."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A card of the page; any part may be absent."""

    title: str
    note: str = ""
    plots: Sequence[Plot] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    text: str = ""
    """Shown as it is, in a fixed pitch."""
    waterfall: Mapping[str, Any] | None = None
    """Requests stage by stage, as `stages.waterfall_data` has them; of one section of a page."""
    waterfall_of: str = "Cell"
    """What the requests are grouped by."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    eyebrow: str
    title: str
    chips: Sequence[tuple[str, str]] = ()
    """(tone, text); tones are verdicts, `met` and `unmet`."""
    stats: Sequence[tuple[str, str]] = ()
    """(value, what it is)."""
    answers: Sequence[Answer] = ()
    """The first card."""
    shares: Sequence[Mapping[str, Any]] = ()
    """Stretches of the bar under the answer that has shares: share, colour, text, tip."""
    sections: Sequence[Section] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    footer: str = ""


def write_page(page: Page, path: Path) -> None:
    """One self-contained HTML file."""
    plots = [
        {"id": plot.id, "data": plot.data, "layout": plot.layout}
        for section in page.sections
        for plot in section.plots
    ]
    waterfalls = [dict(section.waterfall) for section in page.sections if section.waterfall]
    text = template("page.html.j2").render(
        **assets(),
        page=page,
        doubt=doubt_text(page.environment),
        sections=[(section, _body(section)) for section in page.sections],
        environment=environment_items(page.environment),
        plots_json=script_json(plots),
        waterfall_json=script_json(waterfalls[0]) if waterfalls else "",
        plotly_js=plotly_js() if plots or waterfalls else "",
    )
    write_text(path, text)


def _body(section: Section) -> list[list[dict[str, Any]]]:
    """Cells of the section's table: text, sort key, class."""
    body = []
    for row in section.rows:
        texts = [format_value(row[column.key], column.spec) for column in section.columns]
        body.append(
            [
                {
                    "text": text,
                    "value": float(row[column.key]) if column.spec and text else None,
                    "kind": "num" if column.spec else "short" if len(text) <= SHORT_TEXT else "",
                }
                for column, text in zip(section.columns, texts, strict=True)
            ]
        )
    return body


def text_rows(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows as a Markdown table takes them."""
    return [[format_value(row[column.key], column.spec) for column in columns] for row in rows]


def claim_folder(folder: Path, tables: Sequence[str]) -> None:
    """Make a folder for tables of these names. Raises UserError where it holds one, or cannot be made."""
    if any((folder / f"{name}.parquet").exists() for name in tables):
        raise UserError("already holds a run's tables", where=str(folder), mend="another --out")
    make_folder(folder)


def write_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """NAME.parquet and NAME.csv of each table's rows; lists are JSON in CSV."""
    for name, rows in tables.items():
        frame = pd.DataFrame.from_records([dict(row) for row in rows])
        with atomic_path(folder / f"{name}.parquet") as path:
            frame.to_parquet(path, index=False)
        with atomic_path(folder / f"{name}.csv") as path:
            csv_frame(frame).to_csv(path, index=False)
