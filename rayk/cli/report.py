"""Build reports again from a run's tables, or compare runs: `rayk report`."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import guarded, stderr, stdout
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.reports import Result


class ReportFormat(enum.StrEnum):
    html = "html"
    md = "md"
    csv = "csv"
    json = "json"
    aiperf = "aiperf"
    llm_d = "llm-d"
    trace = "trace"


@guarded
def report(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR...", help="Folders of runs.", show_default=False)
    ] = None,
    output_format: Annotated[
        ReportFormat | None,
        typer.Option(
            "--format",
            help="What to write [default: html]; aiperf, llm-d: AIPerf's JSON, llm-d's Benchmark Report, a "
            "file per cell or load; trace: for Perfetto; json: of --columns only.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write, `-` for stdout (md); of csv, aiperf and llm-d the folder "
            "[default: report.EXT in DIR, for several runs compare.EXT in the first DIR]."
        ),
    ] = None,
    columns: Annotated[
        bool,
        typer.Option(
            "--columns", help="Print every column of the tables: type, unit, meaning (text, md, csv, json)."
        ),
    ] = False,
) -> None:
    """Write a run's report again from its tables; two or more runs are compared. Prints the paths.

    A comparison names the cells whose verdicts differ, the cells only some runs have, what differs in the
    spec, the machine and the values, and sets times beside each other; the first DIR is the base.
    """
    if columns:
        _print_columns(directories or [], output_format)
        return
    if not directories:
        raise UserError(
            problem="no folder of a run", where="rayk report", mend="rayk report DIR, or --columns"
        )
    from rayk.reports.report import has_own_page

    if any(map(has_own_page, directories)):
        typer.echo(_write_own_page(directories, output_format, out))
        return
    for path in _write(directories, output_format or ReportFormat.html, out):
        typer.echo(path)


def _write_own_page(directories: list[Path], output_format: ReportFormat | None, out: Path | None) -> Path:
    """Write the page of a folder of neither a run nor a bench: a GPU day, a validation."""
    from rayk.reports.files import make_folder
    from rayk.reports.report import write_html

    if len(directories) > 1 or output_format not in (None, ReportFormat.html) or str(out) == "-":
        raise UserError(
            problem="not of runs to be compared or exported: its report is a page",
            where=", ".join(map(str, directories)),
            mend="rayk report DIR; its tables are in DIR",
        )
    (folder,) = directories
    path = folder / "report.html" if out is None else out
    path = path / "report.html" if path.is_dir() else path
    make_folder(path.parent)
    return write_html(folder, path)


def _print_columns(directories: list[Path], output_format: ReportFormat | None) -> None:
    from rayk.reports.dictionary import FORMATS, columns_text

    if directories:
        raise UserError(problem="takes no folder: the columns are those of every run", where="--columns")
    if output_format is None:
        console = stdout()
        typer.echo(columns_text(console.width if console.is_terminal else None), nl=False)
        return
    if output_format not in FORMATS:
        raise UserError(
            problem=f"--columns has no {output_format}", where="--format", mend=f"one of {', '.join(FORMATS)}"
        )
    typer.echo(FORMATS[output_format](), nl=False)


def _write(directories: list[Path], output_format: ReportFormat, out: Path | None) -> list[Path]:
    from rayk.reports import load

    if output_format is ReportFormat.json:
        raise UserError(problem="json is a format of --columns", where="--format", mend="html, md or csv")
    results = [load(directory) for directory in directories]
    _refuse_mixture(results)
    for result in results:
        if result.age_note:
            stderr().print(f"rayk: {result.directory}: {result.age_note}", markup=False)
    if output_format is ReportFormat.trace:
        return [_write_trace(results, out or directories[0])]
    if output_format in (ReportFormat.aiperf, ReportFormat.llm_d):
        return _write_exports(results, output_format, out or directories[0] / output_format)
    name = f"{'report' if len(results) == 1 else 'compare'}.{output_format}"
    target = out or directories[0]
    if target.is_dir() and output_format is not ReportFormat.csv:
        target /= name
    if output_format is ReportFormat.csv:
        return _write_csv(results, target)
    if output_format is ReportFormat.html:
        return [_write_html(results, target)]
    return _write_markdown(results, target)


def _refuse_mixture(results: list[Result]) -> None:
    """Refuse to compare a run's cells with a bench's loads."""
    from rayk.reports.load_fields import is_load

    benches = [str(r.directory) for r in results if is_load(r.cells)]
    if benches and len(benches) < len(results):
        raise UserError(
            problem=f"of `rayk bench`, and not to be compared with a run: {', '.join(benches)}",
            where="rayk report",
            mend="folders of runs only, or of benches only",
        )


def _write_csv(results: list[Result], folder: Path) -> list[Path]:
    from rayk.reports.compare import write_compare_csv
    from rayk.reports.files import make_folder
    from rayk.reports.table_files import write_csv

    make_folder(folder)
    if len(results) == 1:
        return write_csv(results[0], folder)
    return [write_compare_csv(results, folder / "compare.csv")]


def _write_exports(results: list[Result], output_format: ReportFormat, folder: Path) -> list[Path]:
    from rayk.reports import aiperf, llmd
    from rayk.reports.export import write_exports

    if len(results) > 1 or str(folder) == "-":
        raise UserError(
            problem="is a folder with a file per cell, of one run", where=f"--format {output_format}"
        )
    if output_format is ReportFormat.aiperf:
        paths = write_exports(results[0], folder, aiperf.FILE_NAME, aiperf.aiperf_json)
    else:
        paths = write_exports(results[0], folder, llmd.FILE_NAME, llmd.llmd_yaml)
    if not paths:
        raise UserError(problem="no request of this run was answered", where=str(results[0].directory))
    return paths


def _write_trace(results: list[Result], path: Path) -> Path:
    from rayk.reports.files import make_folder
    from rayk.reports.timeline import write_timeline

    if len(results) > 1 or str(path) == "-":
        raise UserError(problem="a trace is a file, of one run", where="--format trace")
    path = path / "timeline.json" if path.is_dir() else path
    make_folder(path.parent)
    return write_timeline(results[0], path)


def _write_html(results: list[Result], path: Path) -> Path:
    from rayk.reports.compare import write_compare_html
    from rayk.reports.files import make_folder
    from rayk.reports.report import write_html

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
    from rayk.reports.report import markdown

    text = markdown(results[0]) if len(results) == 1 else compare_markdown(results)
    if str(path) == "-":
        typer.echo(text)
        return []
    make_folder(path.parent)
    write_text(path, text)
    return [path]
