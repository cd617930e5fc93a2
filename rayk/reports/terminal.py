"""Show a page's tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rayk.reports.page import Column, text_rows
from rayk.types.verdicts import VERDICTS

# verdict -> rich style
STYLES = dict.fromkeys(VERDICTS, "bold red") | {
    "PASS": "green",
    "NEAR_TIE": "yellow",
    "UNSUPPORTED": "dim",
    "PREDICTED": "cyan",
}
TONE_STYLES = {**STYLES, "met": "green", "unmet": "bold red"}  # tone() -> rich style
MIN_REASON_WIDTH = 24


class _Capped:
    """Shows only the first lines of a text in a table's cell."""

    def __init__(self, text: Text, num_lines: int) -> None:
        self._text = text
        self._num_lines = num_lines

    def __str__(self) -> str:
        return self._text.plain

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self._text.wrap(console, options.max_width, overflow="fold")
        yield from lines[: self._num_lines - 1]
        for last in lines[self._num_lines - 1 : self._num_lines]:
            if len(lines) > self._num_lines:
                last.rstrip()
                last.truncate(options.max_width - 2)
                last.append(" …")
            yield last


def terminal_table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    *,
    width: int | None = None,
    dropped_first: Sequence[str] = (),
    max_lines: int | None = None,
) -> Table:
    """Make a table for a terminal of `width` columns (None: any), dropping the first of `dropped_first` until
    it fits. What a page shows under the first column is left out where nobody has any, and shows `max_lines`
    lines (None: all)."""
    body = text_rows(columns, rows)
    shown = _shown_columns(columns, body, width, dropped_first)
    table = Table(title=title, title_justify="left", title_style="bold")
    for i in shown:
        column = columns[i]
        table.add_column(
            column.title,
            justify="right" if column.spec else "left",
            overflow="fold",
            no_wrap=bool(dropped_first) and bool(column.spec or column.tone),
        )
    for texts, row in zip(body, rows, strict=True):
        styles = [TONE_STYLES.get(row[column.tone], "") if column.tone else "" for column in columns]
        told: list[Text | _Capped] = [
            Text(text, style=style) for text, style in zip(texts, styles, strict=True)
        ]
        if max_lines is not None:
            for i, column in enumerate(columns):
                told[i] = _Capped(Text(texts[i]), max_lines) if column.is_under_first else told[i]
        table.add_row(*(told[i] for i in shown))
    return table


def _shown_columns(
    columns: Sequence[Column], body: list[list[str]], width: int | None, dropped_first: Sequence[str]
) -> list[int]:
    """Find the columns that fit, each as wide as its texts (a reason folds)."""
    widths: dict[str, int] = {}
    for i, column in enumerate(columns):
        longest = max((len(row[i]) for row in body), default=0)
        if column.is_under_first:
            longest = min(longest, MIN_REASON_WIDTH)
        if longest or not column.is_under_first:
            widths[column.title] = max(longest, len(column.title)) + 3  # padding and a border
    for title in dropped_first:
        if width is None or sum(widths.values()) + 1 <= width:
            break
        widths.pop(title, None)
    return [i for i, column in enumerate(columns) if column.title in widths]
