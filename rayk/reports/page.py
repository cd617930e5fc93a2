"""What a report is made of, however it is written: a page of sections with answers, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayk.reports.values import format_value


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question and its answer."""

    question: str
    text: str
    is_answered: bool = True
    """Else it is folded."""
    tone: str = ""
    """met or unmet where the answer is good or bad news."""
    command: str = ""
    has_shares: bool = False
    """Whether the bar of shares stands under it."""
    table: Sequence[Sequence[str]] = ()
    """Its numbers: a row of titles, then the others; each begins with what it tells."""
    note: str = ""
    """What the table's numbers are."""


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


def text_rows(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows as a Markdown table takes them."""
    return [[format_value(row[column.key], column.spec) for column in columns] for row in rows]
