"""A folder of rows that are written as they are measured, and what is made of them: CSV, JSON, a plain page.

Standard library only. rows.jsonl is the truth: a line per row, appended and flushed to disk when it is
measured, and a line that ends each item of a stage. Rows of an item that has not ended are told until it is
measured again.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from rayk.reports.environment import git_commit, package_versions

NAME = "gpu-day"
CLOCKS = ("sm_mhz", "memory_mhz", "watts", "celsius")
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
SHARES = ("of_copy", "of_matmul")

STYLE = """body { font: 14px sans-serif; margin: 2em } table { border-collapse: collapse; margin-bottom: 2em }
td, th { border: 1px solid #bbb; padding: 2px 8px; text-align: left } td.n { text-align: right }
tr.failed td { background: #fdd } tr.skipped td { color: #777 }"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one item of a stage gave. Rates count each byte and each FLOP that the work needs once."""

    kernel: str
    shape: str = ""
    variant: str = ""
    status: str = "measured"
    """measured; passed, skipped or failed of tests and of what was not measured."""
    ms: float | None = None
    gbps: float | None = None
    of_copy: float | None = None
    """Share of the bandwidth of a copy on the device, measured in the same process."""
    tflops: float | None = None
    of_matmul: float | None = None
    """Share of the rate of a large matrix product."""
    value: float | None = None
    """Of `unit`, where it is not a time."""
    unit: str = ""
    note: str = ""


COLUMNS = ("stage", "item", *(f.name for f in fields(Row)), *CLOCKS, "at", "commit", "torch", "triton")


class Rows:
    """The rows of one folder; several processes may append to it."""

    def __init__(self, folder: Path, clocks: Callable[[], dict[str, float]] = dict, commit: str = "") -> None:
        """`clocks` is asked for each item; `commit` is for a work tree without git."""
        self.folder = folder
        self._clocks = clocks
        self.commit = commit
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, stage: str, item: str, rows: Sequence[Row]) -> None:
        """Write all rows of an item to disk."""
        with self.measuring(stage, item) as add:
            for row in rows:
                add(row)

    @contextmanager
    def measuring(self, stage: str, item: str) -> Iterator[Callable[[Row], None]]:
        """Yield what writes a row of an item to disk. It has ended when the block has, without error."""
        versions = package_versions()
        whose = {"stage": stage, "item": item, "attempt": f"{os.getpid()}-{time.time_ns()}"}
        where = {
            "commit": self.commit or git_commit() or "unknown",
            "torch": versions["torch"],
            "triton": versions["triton"],
        }

        def add(row: Row) -> None:
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._write({**whose, **asdict(row), **self._clocks(), "at": at, **where})

        yield add
        self._write({**whose, "ended": True})

    def _write(self, line: Mapping[str, Any]) -> None:
        path = self.folder / "rows.jsonl"
        with path.open("ab+") as file:
            cut = b""
            if file.tell():
                file.seek(-1, os.SEEK_END)
                cut = b"" if file.read(1) == b"\n" else b"\n"  # a line that was never finished
            file.write(cut + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Every row so far, or those of `ended` items; a line that a dying machine left unfinished is none.
        Of an item that was begun anew, rows of the last time count."""
        path = self.folder / "rows.jsonl"
        if not path.is_file():
            return []
        lines: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        counting = set({(row["stage"], row["item"]): row["attempt"] for row in lines}.values())
        if ended:
            counting &= {row["attempt"] for row in lines if "ended" in row}
        return [
            {key: value for key, value in row.items() if key != "attempt"}
            for row in lines
            if row["attempt"] in counting and "ended" not in row
        ]

    def items(self, stage: str) -> set[str]:
        """Those that have ended."""
        return {row["item"] for row in self.read(ended=True) if row["stage"] == stage}

    def count(self, stage: str) -> int:
        """Count the rows of those."""
        return sum(row["stage"] == stage for row in self.read(ended=True))

    def write_tables(self, environment: Mapping[str, Any]) -> None:
        """Write gpu-day.csv, gpu-day.json, gpu-day.html and gpu-day.md."""
        rows = self.read()
        with _replacing(self.folder / f"{NAME}.csv") as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        with _replacing(self.folder / f"{NAME}.json") as path:
            path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
        with _replacing(self.folder / f"{NAME}.html") as path:
            path.write_text(page(rows, environment))
        with _replacing(self.folder / f"{NAME}.md") as path:
            path.write_text(text(rows, environment))


class _replacing:  # noqa: N801 - used like a function
    """A path to write to, which then takes the place of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.new")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._temporary.replace(self._path)


def page(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> str:
    """A plain page: a table per stage, measured over ceiling."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>GPU day</title><style>{STYLE}</style><h1>GPU day</h1>",
        *(f"<p>{escape(line)}</p>" for line in _about(environment)),
    ]
    for stage, used, own in _tables(rows, COLUMNS[2:]):
        heads = "".join(f"<th>{escape(name.replace('_', ' '))}" for name in used)
        body = "".join(
            f"<tr class={row['status']}>{''.join(_cell(name, row.get(name)) for name in used)}</tr>\n"
            for row in own
        )
        parts.append(f"<h2>{escape(stage)}</h2>\n<table><tr>{heads}</tr>\n{body}</table>")
    return "\n".join(parts) + "\n"


def text(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> str:
    """The same in Markdown, to be kept: tests that passed are counted, and what is alike in all rows is told
    once."""
    parts = ["# A day on a GPU", "", *(f"- {line}" for line in _about(environment))]
    parts.append(f"- commit {environment.get('git_commit')}, {environment.get('platform')}")
    for stage, used, own in _tables(rows, COLUMNS[2 : -len(CLOCKS) - 4]):
        passed = sum(row["status"] == "passed" for row in own)
        parts += ["", f"## {stage}", "", *([f"{passed} of {len(own)} passed.", ""] if passed else [])]
        told = [row for row in own if row["status"] != "passed"]
        if told:
            parts += ["| " + " | ".join(x.replace("_", " ") for x in used) + " |", "|---" * len(used) + "|"]
        for row in told:
            cells = (_shown(name, row.get(name)).replace("|", "/") for name in used)
            parts.append("| " + " | ".join(cells) + " |")
    return "\n".join([*parts, "", "Reproduce:", "", "    python jobs/gpu_day.py", ""])


def _about(environment: Mapping[str, Any]) -> tuple[str, ...]:
    packages = ", ".join(f"{k} {v}" for k, v in environment.get("packages", {}).items() if v)
    return (
        f"{environment.get('device', '')}; {packages}",
        "of copy, of matmul: shares of what a copy and a matrix product reached in the same process.",
    )


def _tables(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> Iterator[tuple[str, list[str], list[Mapping[str, Any]]]]:
    """Each stage, those of its columns in which something stands, and its rows."""
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        yield stage, [name for name in columns if any(row.get(name) not in (None, "") for row in own)], own


def _cell(name: str, value: Any) -> str:
    return (
        f"<td class=n>{_shown(name, value)}"
        if isinstance(value, float | int)
        else f"<td>{escape(_shown(name, value))}"
    )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float | int):
        return f"{value:.0%}" if name in SHARES else f"{value:.4g}"
    return "" if value is None else str(value)


def nvidia_clocks() -> dict[str, float]:
    """The first GPU's clocks, power and temperature; nothing where nvidia-smi cannot say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return dict(zip(CLOCKS, map(float, text.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
