"""Tables of GitHub Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; pipes and line breaks in texts are escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(t.replace("|", "\\|").replace("\n", " ") for t in row) + " |" for row in lines]
