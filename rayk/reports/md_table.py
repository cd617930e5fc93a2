"""Write tables of GitHub Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.reports.values import printable


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ([escaped(text) for text in row] for row in (titles, *rows))
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def escaped(text: str) -> str:
    """Escape a text so that Markdown shows it as it is, on one line."""
    text = printable(text)
    for mark in "\\|<":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
