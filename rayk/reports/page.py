"""Model a report, however it is written: a page of sections with answers, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayk.reports.values import format_value


@dataclass(frozen=True, kw_only=True)
class Answer:
    question: str
    text: str
    is_answered: bool = True  # else it is folded
    tone: str = ""  # met or unmet where the answer is good or bad news
    command: str = ""
    shares: Sequence[Mapping[str, Any]] = ()  # stretches of a bar under it: share, colour, text, tip
    table: Sequence[Sequence[str]] = ()
    """Its numbers: a row of titles, then the others; each begins with what it tells."""
    note: str = ""  # what the table's numbers are


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Holds a Plotly figure as plain data; `plots.py` names the words that stand for the page's colours."""

    id: str
    title: str = ""
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    is_wide: bool = False  # whether it takes the whole width of a page, else half of it


@dataclass(frozen=True)
class Column:
    title: str
    key: str
    spec: str = ""  # how numbers are written (see `format_value`); texts have none
    tone: str = field(default="", kw_only=True)  # key of what colours its texts: a verdict, `met` or `unmet`
    beside: str = field(default="", kw_only=True)  # key of what stands in brackets behind its texts
    is_under_first: bool = field(default=False, kw_only=True)
    """On a page it stands under the first column's text, where it is seen without scrolling."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A card of the page; any part may be absent."""

    title: str
    id: str = ""
    is_folded: bool = False  # closed on a page until opened; left out of Markdown
    note: str = ""  # a paragraph per line
    hint: str = ""  # how a page can be used; follows the note
    words: Mapping[str, str] = field(default_factory=dict)  # meanings of names in the table
    grids: Sequence[Mapping[str, Any]] = ()
    """Matrices: title, corner, columns, rows of (label, cells), and heading where several stand under one. A
    cell is None or has text, note, tip, and a tone or heat, 0 to 1; Markdown shows its verdict, if any."""
    plots: Sequence[Plot] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    items: Sequence[tuple[str, Sequence[str]]] = ()  # names, each with lines about it
    text: str = ""  # shown as it is, in a fixed pitch
    waterfall: Mapping[str, Any] | None = None  # as `stages.waterfall_data` makes it; one section has it
    waterfall_of: str = "Cell"  # what the requests are grouped by


@dataclass(frozen=True, kw_only=True)
class Page:
    eyebrow: str
    name: str = ""  # begins the window's title
    title: str
    headline: str = ""  # title and chips in words, for the window and Markdown
    lead: str = ""
    chips: Sequence[tuple[str, str]] = ()  # (tone, text); tones are verdicts, `met` and `unmet`
    stats: Sequence[tuple[str, str]] = ()  # (value, what it is)
    answers: Sequence[Answer] = ()  # the first card
    sections: Sequence[Section] = ()
    # folded at the page's end; what makes times doubtful begins the page
    environment: Mapping[str, Any] = field(default_factory=dict)
    footer: str = ""


def cell_text(row: Mapping[str, Any], column: Column) -> str:
    text = format_value(row[column.key], column.spec)
    return f"{text} ({row[column.beside]})" if text and row.get(column.beside) else text


def text_rows(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[cell_text(row, column) for column in columns] for row in rows]
