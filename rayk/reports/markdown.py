"""Write a page as GitHub Markdown, without figures and what is folded."""

from __future__ import annotations

from typing import Any

from rayk.reports.md_table import escaped, markdown_table
from rayk.reports.page import Answer, Page, Section, text_rows
from rayk.reports.trust import doubt_text


def page_markdown(page: Page) -> str:
    lines = [f"# {escaped(page.headline or page.title)}", ""]
    for text in (page.lead, doubt_text(page.environment)):
        lines += [escaped(text), ""] if text else []
    if page.answers:
        lines += ["## In short", ""]
        for answer in page.answers:
            lines += _answer(answer)
    for section in page.sections:
        body = [] if section.is_folded else _body(section)
        notes = [line for text in section.note.splitlines() for line in (escaped(text), "")]
        # A note on an empty table may be all there is to say.
        if body or (section.columns and not section.rows):
            lines += [f"## {escaped(section.title)}", "", *notes, *(body or ["None.", ""])]
    return "\n".join(lines)


def _answer(answer: Answer) -> list[str]:
    lines = [f"**{answer.question}** {escaped(answer.text)}", ""]
    if answer.table:
        head, *rows = (list(row) for row in answer.table)
        lines += [*markdown_table(head, rows), "", answer.note, ""]
    if answer.command:
        lines += ["```", answer.command, "```", ""]
    return lines


def _body(section: Section) -> list[str]:
    lines = []
    for grid in section.grids:
        heading = f"{grid['heading']}: " if grid.get("heading") else ""
        rows = [[label, *map(_grid_text, cells)] for label, cells in grid["rows"]]
        lines += [f"### {escaped(heading + grid['title'])}", ""]
        lines += [*markdown_table([grid["corner"], *grid["columns"]], rows), ""]
    if section.rows:
        titles = [column.title for column in section.columns]
        lines += [*markdown_table(titles, text_rows(section.columns, section.rows)), ""]
    for name, (first, *notes) in section.items:
        lines += [f"- {escaped(name)}: {escaped(first)}", *(f"  - {escaped(note)}" for note in notes)]
    lines += [""] if section.items else []
    return [*lines, "```", section.text, "```", ""] if section.text else lines


def _grid_text(cell: dict[str, Any] | None) -> str:
    """Give the verdict in full: nothing can be pointed at for more."""
    if cell is None:
        return ""
    told = f"{cell['text']} ({cell['note']})" if cell["note"] else cell["text"]
    return str(cell.get("verdict", told))
