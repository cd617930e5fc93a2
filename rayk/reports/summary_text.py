"""What a report's first cards say, as Markdown: answers, transfers by TP sizes, limits."""

from __future__ import annotations

from rayk.reports.answers import answers
from rayk.reports.md_table import escaped, markdown_table
from rayk.reports.memory import moved_text
from rayk.reports.page import Answer
from rayk.reports.result import Result
from rayk.reports.stages import limit_rows, told_limits
from rayk.reports.tp_pairs import ceiling_of, pair_grids
from rayk.reports.values import format_value


def answer_lines(result: Result) -> list[str]:
    """The four answers, with the numbers and commands of those that have any."""
    lines = ["## In short", ""]
    for answer in answers(result):
        lines += _answer(answer)
    return lines


def _answer(answer: Answer) -> list[str]:
    lines = [f"**{answer.question}** {escaped(answer.text)}", ""]
    if answer.table:
        head, *rows = (list(row) for row in answer.table)
        lines += [*markdown_table(head, rows), "", answer.note, ""]
    if answer.command:
        lines += ["```", answer.command, "```", ""]
    return lines


def pair_lines(result: Result) -> list[str]:
    """A table per fact and pair of layouts; nothing where nothing moved."""
    grids = pair_grids(result)
    if not grids:
        return []
    lines = ["## Transfers by TP sizes", "", ceiling_of(result.environment).text, ""]
    moved = moved_text(result)
    lines += [moved, ""] if moved else []
    for grid in grids:
        for fact in grid["facts"]:
            rows = [[label, *map(_cell_text, cells)] for label, cells in fact["rows"]]
            lines += [
                f"### {escaped(grid['title'])}: {fact['title']}",
                "",
                *markdown_table(["TP", *fact["columns"]], rows),
                "",
            ]
    return lines


def _cell_text(cell: dict[str, str] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['text']} ({cell['note']})" if cell["note"] else cell["text"]


def limit_lines(result: Result) -> list[str]:
    """Every cell's limit; nothing without requests."""
    rows = limit_rows(result)
    if not rows:
        return []
    limits = told_limits(rows)
    titles = ["cell_id", "limit", *(f"{name} %" for name in limits), "evidence"]
    texts = [
        [
            row["cell_id"],
            row["limit"],
            *(format_value(row[name], ".1f") for name in limits),
            row["evidence"],
        ]
        for row in rows
    ]
    return ["## What limits this run", "", *markdown_table(titles, texts), ""]
