"""Print tables where there is no terminal: a line per row, nothing cut, folded or framed."""

from __future__ import annotations

from itertools import zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = "  "


def plain_lines(table: Table) -> list[str]:
    """Write title, heads, rows and caption; columns stand below each other."""
    heads = [str(column.header) for column in table.columns]
    rows = [list(row) for row in zip_longest(*(map(_one_line, c.cells) for c in table.columns), fillvalue="")]
    justify = ["rjust" if column.justify == "right" else "ljust" for column in table.columns]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [str(table.title)] if table.title else []
    for row in (heads, *rows):
        texts = (getattr(text, how)(width) for text, how, width in zip(row, justify, widths, strict=True))
        lines.append(GAP.join(texts).rstrip())
    return [*lines, str(table.caption)] if table.caption else lines


def _one_line(cell: object) -> str:
    # What a table is given as str is markup to it.
    text = Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
    return " ".join(text.split("\n"))


def print_table(console: Console, table: Table) -> None:
    """Print as a table on a terminal, as plain lines elsewhere."""
    if console.is_terminal:
        console.print(table)
        return
    for line in plain_lines(table):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
