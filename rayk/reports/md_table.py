"""Tables of GitHub Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of plain texts."""
    head, *body = ([escaped(text) for text in row] for row in (titles, *rows))
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def printable(text: str) -> str:
    """The text, with what would steer a terminal spelled out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """A text as Markdown that says just that, on one line: no tag, no further column."""
    text = printable(text)
    for mark in "\\|<":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
