"""What benchmarks share: options, rounds in turns, the page that is printed and recorded, the exit status."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rayk.reports import collect_environment

RESULTS = Path(__file__).with_name("results")


class Page:
    """Markdown that is printed as it is found, and kept to be recorded."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._data: list[Sequence[object]] = []

    def say(self, *lines: str) -> None:
        """Add lines as they stand."""
        print(*lines, sep="\n", flush=True)
        self._lines += lines

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

    def data(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Keep every measurement for a file of comma-separated values."""
        self._data = [titles, *rows]

    def write(self, folder: Path, name: str) -> None:
        """Write <name>.md, and <name>.csv where there are measurements to keep."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.text, encoding="utf-8")
        if self._data:
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(self._data)

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join([*self._lines, ""])


def run(
    measure: Callable[[argparse.Namespace, Page], Sequence[str] | None],
    script: str,
    *,
    title: str,
    **options: Any,
) -> int:
    """Parse the command line, measure, print the page and record it if asked; returns the exit status.

    measure: fills the page and returns a line for each limit that is missed: the row, what was measured and
             the limit. They are told on stderr, and with --check they fail the script.
    options: the default of each, or the arguments of argparse's add_argument.
    """
    path = Path(script).resolve()
    parser = argparse.ArgumentParser(
        description=sys.modules[measure.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in options.items():
        given = default if isinstance(default, dict) else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    parser.add_argument("--check", action="store_true", help="exit status 1 when a limit is missed")
    parser.add_argument("--out", type=Path, help="also write Markdown, and CSV if there is any, here")
    parser.add_argument("--record", action="store_true", help=f"write results/{path.stem}.md")
    asked = parser.parse_args()
    environment = collect_environment(command=sys.argv, load_at_start=os.getloadavg()[0])
    page = Page()
    page.say(f"# {title}", "", f"    {command_line(f'jobs/benchmarks/{path.name}', environment)}", "")
    missed = measure(asked, page) or []
    environment["load_at_end"] = os.getloadavg()[0]
    page.say("", "Environment:", "", *(f"- {line}" for line in machine(environment)))
    if asked.out is not None:
        page.write(asked.out, path.stem)
    if asked.record:
        (RESULTS / f"{path.stem}.md").write_text(page.text, encoding="utf-8")
    return ending(missed, check=asked.check)


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


# --- a second process -----------------------------------------------------------------------------


@contextmanager
def second_process(serve: Callable[[Connection], None]) -> Iterator[Connection]:
    """A pipe to a process that serves it until it is sent None."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,), daemon=True)
    child.start()
    yield pipe
    pipe.send(None)
    child.join()


# --- what ran it ----------------------------------------------------------------------------------


def command_line(script: str, environment: Mapping[str, Any], without: Sequence[str] = ("--out",)) -> str:
    """How to run it again. `without`: options, each with a value, that change nothing of what is measured."""
    arguments = [str(a) for a in environment["command"][1:]]
    for i in range(len(arguments) - 1, -1, -1):
        name, equals, _ = arguments[i].partition("=")
        if name in without:
            del arguments[i : i + (1 if equals else 2)]
    return shlex.join(["python", script, *arguments])


def machine(environment: Mapping[str, Any]) -> list[str]:
    """What measured, in short lines. `environment`: see `when`."""
    devices, packages = environment["devices"], environment["packages"]
    threads = ["one thread per process"] if environment.get("threads") == 1 else []
    cpu = ", ".join([f"{devices['cpu']}, {devices['num_cores']} cores", *threads, *devices["gpus"]])
    return [
        f"{cpu}; {environment['platform']}, Python {environment['python']}",
        f"torch {packages['torch']}, ray {packages['ray']}, nixl {packages['nixl-cu13']}",
        *when(environment),
    ]


def when(environment: Mapping[str, Any]) -> list[str]:
    """At which commit, on which day and beside what. `environment`: with load_at_start and load_at_end."""
    return [
        *([f"commit {environment['git_commit']}"] if environment["git_commit"] else []),
        f"{str(environment['started'])[:10]}; load {environment['load_at_start']:.1f} when it began, "
        f"{environment['load_at_end']:.1f} when it ended: trust ratios, not single figures",
    ]
