"""`rayk report`: build reports again from a run's tables, or compare runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import guarded
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.reports import Result


class Format(enum.StrEnum):
    """What to write."""

    html = "html"
    md = "md"
    csv = "csv"


@guarded
def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.", show_default=False)
    ],
    output_format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.html,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write, `-` for stdout (md); of csv the folder "
            "[default: report.EXT in DIR, for several runs compare.EXT in the first DIR]."
        ),
    ] = None,
) -> None:
    """Write a run's report again from its tables; two or more runs are compared. Prints the paths.

    A comparison names the cells whose verdicts differ, the cells only some runs have, what differs in the
    spec, the machine and the values, and sets times beside each other; the first DIR is the base.
    """
    from rayk.reports import load

    results = [load(directory) for directory in directories]
    name = f"{'report' if len(results) == 1 else 'compare'}.{output_format}"
    target = out or directories[0]
    if target.is_dir() and output_format is not Format.csv:
        target /= name
    if output_format is Format.csv:
        paths = _write_csv(results, target)
    elif output_format is Format.html:
        paths = [_write_html(results, target)]
    else:
        paths = _write_markdown(results, target)
    for path in paths:
        typer.echo(path)


def _write_csv(results: list[Result], folder: Path) -> list[Path]:
    from rayk.reports.compare import write_compare_csv
    from rayk.reports.files import make_folder
    from rayk.reports.text import write_csv

    make_folder(folder)
    if len(results) == 1:
        return write_csv(results[0], folder)
    return [write_compare_csv(results, folder / "compare.csv")]


def _write_html(results: list[Result], path: Path) -> Path:
    from rayk.reports.compare import write_compare_html
    from rayk.reports.files import make_folder
    from rayk.reports.html import write_html

    if str(path) == "-":
        raise UserError(problem="HTML is written to a file", where="--out -")
    make_folder(path.parent)
    if len(results) > 1:
        return write_compare_html(results, path)
    assert results[0].directory is not None
    return write_html(results[0].directory, path)


def _write_markdown(results: list[Result], path: Path) -> list[Path]:
    from rayk.reports.compare import compare_markdown
    from rayk.reports.files import make_folder, write_text
    from rayk.reports.text import markdown

    text = markdown(results[0]) if len(results) == 1 else compare_markdown(results)
    if str(path) == "-":
        typer.echo(text)
        return []
    make_folder(path.parent)
    write_text(path, text)
    return [path]
