"""What benchmarks share: options, rounds in turns, the page that is printed and recorded, the exit status."""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rayk.reports import collect_environment
from rayk.reports.html import write_page
from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Plot, Section, text_rows
from rayk.reports.page import Page as ReportPage
from rayk.reports.rerun import bench_commands
from rayk.types.errors import RaykError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")


class Page:
    """Markdown that is printed as it is found, and kept to be recorded; tables and figures for --out."""

    def __init__(self, environment: dict[str, Any]) -> None:
        self.environment = environment
        """What `machine` tells of; a measurement may add to it."""
        self.tables: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        """NAME.parquet and NAME.csv of --out, by name."""
        self.name = ""
        """Of the files that are written; empty: the script's."""
        self.wrong: list[str] = []
        """What must never be: told on stderr, and the script fails, with --check or without."""
        self._lines: list[str] = []
        self._data: list[Sequence[object]] = []
        self._sections: list[Section] = []

    def say(self, *lines: str) -> None:
        """Add lines as they stand."""
        for line in lines:
            print(line, flush=True)
            self._lines.append(line)

    def head(self, *titles: str) -> None:
        """Begin a table: the first column is of words, the others are of numbers."""
        self.row(*titles)
        self.row("---", *["---:"] * (len(titles) - 1))

    def row(self, *cells: object) -> None:
        """Add a row to the table."""
        self.say(f"| {' | '.join(map(str, cells))} |")

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a whole table."""
        self.head(*titles)
        for row in rows:
            self.row(*row)

    def section(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Sequence[Mapping[str, Any]],
        *,
        note: str = "",
        plots: Sequence[Plot] = (),
    ) -> None:
        """Add a table; its title, its note and its figures are for report.html alone."""
        self.say(*markdown_table([column.title for column in columns], text_rows(columns, rows)), "")
        self._sections.append(Section(title=title, note=note, columns=columns, rows=rows, plots=plots))

    def data(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Keep every measurement for a file of comma-separated values."""
        self._data = [titles, *rows]

    def write(self, folder: Path, name: str, title: str) -> None:
        """Write <name>.md, <name>.csv if `data` was kept, environment.json, the tables and report.html."""
        (folder / f"{name}.md").write_text(self.text, encoding="utf-8")
        told = json.dumps(self.environment, indent=2, default=str)
        (folder / "environment.json").write_text(f"{told}\n", encoding="utf-8")
        if self.tables:
            # Here and below: a machine with a GPU may lack pandas.
            from rayk.reports.table_files import write_tables

            write_tables(self.tables, folder)
        if self._sections:
            wrong = [Section(title="What is wrong", text="\n".join(self.wrong))] if self.wrong else []
            page = ReportPage(
                eyebrow="benchmark",
                title=title,
                chips=[("unmet", f"{len(self.wrong)} wrong") if wrong else ("met", "nothing wrong")],
                sections=[
                    *self._sections,
                    *wrong,
                    Section(title="Reproduce", text=bench_commands(self.environment)),
                ],
                environment=self.environment,
            )
            write_page(page, folder / "report.html")
        if self._data:
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(self._data)

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])


def run(
    measure: Callable[[argparse.Namespace, Page], Sequence[str] | None],
    script: str,
    *,
    title: str,
    argv: Sequence[str] | None = None,
    keeps: bool = False,
    **options: Any,
) -> int:
    """Parse the command line, measure, print the page and record it if asked; returns the exit status.

    measure: fills the page and returns a line for each limit that is missed: the row, what was measured and
             the limit. They are told on stderr, and with --check they fail the script.
    keeps: whether there are results in a folder always, runs/<name>-<time> where --out names no other.
    options: the default of each, or the arguments of argparse's add_argument.
    """
    path = Path(script).resolve()
    words = sys.argv if argv is None else [script, *argv]
    about = sys.modules[measure.__module__].__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=_Help)
    for name, default in options.items():
        given = default if isinstance(default, dict) else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    parser.add_argument("--check", action="store_true", help="exit status 1 when a limit is missed")
    folder = " [default: runs/NAME-TIME]" if keeps else ""
    out_help = f"also write Markdown, and what there is of tables, here{folder}"
    parser.add_argument("--out", type=Path, help=out_help)
    parser.add_argument("--record", action="store_true", help=f"write results/{path.stem}.md")
    asked = parser.parse_args(words[1:])
    if asked.out is None and keeps:
        asked.out = Path("runs") / f"{path.stem.replace('_', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    if asked.out is not None:
        from rayk.reports.table_files import claim_folder

        claim_folder(asked.out, [there.stem for there in asked.out.glob("*.parquet")])
    command = [str(path.relative_to(ROOT)), *words[1:]]
    page = Page(collect_environment(command=command, load_at_start=os.getloadavg()[0]))
    page.say(f"# {title}", "")
    try:
        missed = measure(asked, page) or []
    except RaykError:
        with suppress(OSError):  # it holds something
            if asked.out is not None:
                asked.out.rmdir()
        raise
    page.environment["load_at_end"] = os.getloadavg()[0]
    page.say("", "Environment:", "", *(f"- {line}" for line in machine(page.environment)))
    page.say("", "Reproduce:", "", *(f"    {line}" for line in bench_commands(page.environment).splitlines()))
    name = page.name or path.stem
    if asked.out is not None:
        page.write(asked.out, name, title)
        print(f"results: {asked.out}", file=sys.stderr)
    if asked.record and not page.wrong:
        (RESULTS / f"{name}.md").write_text(page.text, encoding="utf-8")
    return max(ending(page.wrong, check=True), ending(missed, check=asked.check))


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A script's docstring as it is written, and defaults of options that have one and say what they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def option(default: Any, text: str, **more: Any) -> dict[str, Any]:
    """The arguments of add_argument, of the default's type unless `more` says another."""
    return {"default": default, "type": type(default), "help": text, **more}


def above_zero(text: str) -> int:
    """A count of argparse's, which reports the ValueError of one below 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


above_zero.__name__ = "number above 0"  # argparse says it


def part(text: str) -> tuple[int, int]:
    """Read K/N, the Kth of N parts; argparse reports the ValueError of another text."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError
    return number, of


part.__name__ = "part K/N"  # argparse says it


def ending(missed: Sequence[str], *, check: bool) -> int:
    """Tell the missed limits on stderr; returns the exit status: 1 if there are some and `check` is set."""
    for line in missed:
        print(line, file=sys.stderr)
    return int(check and bool(missed))


# --- rounds ---------------------------------------------------------------------------------------


def in_turns(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    *,
    limit_s: float = float("inf"),
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> list[list[float]]:
    """Milliseconds of each call, by round; every round runs all calls, each time another one first.

    One round more, the first, is not counted. After three rounds, none begins later than `limit_s`.
    """
    found: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + limit_s
    for number in range(rounds + 1):
        for i in range(len(calls)):
            turn = (number + i) % len(calls)
            began = clock_ns()
            calls[turn]()
            took = clock_ns() - began
            if number:
                found[turn].append(took / 1e6)
        if number >= min(3, rounds) and time.perf_counter() > until:
            break
    return found


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def lines(
    id: str,
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str = "prompt tokens",
    y: str = "ms",
) -> Plot:
    """A figure of named lines through their (xs, ys); both axes are logarithmic."""
    data = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(xs), "y": list(ys)}
        | {"line": {"color": f"series{1 + number % 6}"}, "marker": {"color": f"series{1 + number % 6}"}}
        for number, (name, (xs, ys)) in enumerate(series.items())
    ]
    axes = {name: {"title": {"text": text}, "type": "log"} for name, text in (("xaxis", x), ("yaxis", y))}
    return Plot(id=id, title=title, data=data, layout={"height": 360, "showlegend": True, **axes})


# --- a second process -----------------------------------------------------------------------------


@contextmanager
def second_process(serve: Callable[[Connection], None]) -> Iterator[Connection]:
    """A pipe to a process that serves it until it is sent None."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,), daemon=True)
    child.start()
    theirs.close()  # so that nobody waits for a child that is gone
    yield pipe
    pipe.send(None)
    child.join()


# --- what ran it ----------------------------------------------------------------------------------


def machine(environment: Mapping[str, Any]) -> list[str]:
    """What measured, in short lines. `environment`: see `when`."""
    devices, packages, threads = environment["devices"], environment["packages"], environment.get("threads")
    told = [] if threads is None else ["one thread per process" if threads == 1 else f"{threads} threads"]
    cpu = ", ".join([f"{devices['cpu']}, {devices['num_cores']} cores", *told, *devices["gpus"]])
    names = {"torch": "torch", "ray": "ray", "nixl": "nixl-cu13", "transformers": "transformers"}
    return [
        f"{cpu}; {environment['platform']}, Python {environment['python']}",
        ", ".join(f"{name} {packages[package]}" for name, package in names.items()),
        *when(environment),
    ]


def when(environment: Mapping[str, Any]) -> list[str]:
    """At which commit, on which day and beside what. `environment`: with load_at_start and load_at_end."""
    return [
        *([f"commit {environment['git_commit']}"] if environment["git_commit"] else []),
        f"{str(environment['started'])[:10]}; load {environment['load_at_start']:.1f} when it began, "
        f"{environment['load_at_end']:.1f} when it ended: trust ratios, not single figures",
    ]
