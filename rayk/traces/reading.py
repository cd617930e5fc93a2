"""Find out a trace's format and read it: whole and in order of time, or as a stream that keeps no row."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, get_args

from rayk.traces.azure import HEADER, AzureLines
from rayk.traces.mooncake import AgenticLines, MooncakeLines
from rayk.traces.record import Recorded
from rayk.types.bounds import MAX_REQUESTS
from rayk.types.errors import UserError
from rayk.types.files import open_plain, parse_json

TraceFormat = Literal["mooncake", "azure", "agentic"]
FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)
MAX_LINE_BYTES = 1 << 24


class LineParser(Protocol):
    """Parses the lines of one file, in order."""

    def parse(self, line: str, where: str) -> Recorded | None:
        """Parse one line; None for one that is no request. Raises UserError with `where`."""
        ...


_PARSERS: Mapping[TraceFormat, Callable[[], LineParser]] = {
    "mooncake": MooncakeLines,
    "azure": AzureLines,
    "agentic": AgenticLines,
}


def read_trace(path: Path, *, format: TraceFormat | None = None, limit: int | None = None) -> list[Recorded]:
    """Read the first `limit` requests in order of their time, turns of a session behind one another.

    `format` None is told by the file. Raises UserError that names file and line, and for more than
    MAX_REQUESTS.
    """
    timed = ((at_ns, row) for _, at_ns, row in _with_known_times(_rows(path, format)))
    if limit is not None:
        kept = heapq.nsmallest(limit, timed, key=lambda pair: pair[0])
    else:
        kept = list(islice(timed, MAX_REQUESTS + 1))
        kept.sort(key=lambda pair: pair[0])
    if len(kept) > MAX_REQUESTS:
        problem = f"more than {MAX_REQUESTS:,} requests"
        raise UserError(problem=problem, where=str(path), mend="a limit (--num-requests)")
    if not kept:
        raise UserError(problem="the trace is empty", where=str(path))
    # An Azure trace counts from its first row, which may not be its earliest.
    begin_ns = min(0, kept[0][0])
    rows = (row for _, row in kept)
    return [r if r.at_ns is None or not begin_ns else replace(r, at_ns=r.at_ns - begin_ns) for r in rows]


def stream_trace(path: Path, *, format: TraceFormat | None = None) -> Iterator[Recorded]:
    """Yield requests as the file has them, holding none of them (of an agentic trace, its sessions' names).

    Raises UserError that names file and line, also where a request may be due before one that stands before
    it and waits for no answer: a replay would come to it too late.
    """
    last_ns = 0
    begun: set[str] = set()
    for where, at_ns, row in _with_known_times(_rows(path, format)):
        if at_ns < last_ns:
            problem = "it may be due before requests above it, and a stream must be in order"
            mend = "sort the file by time, with a session's turns behind its first"
            raise UserError(problem=problem, where=where, mend=mend)
        if row.session not in begun:
            last_ns = at_ns
        if row.session is not None:
            begun.add(row.session)
        yield row


def find_format(path: Path) -> TraceFormat:
    """Tell a format by the file's first line. Raises UserError."""
    with closing(_lines(path)) as lines:
        where, line = next(lines, ("", ""))
    if not line:
        raise UserError(problem="the trace is empty", where=str(path))
    if line.strip() == HEADER:
        return "azure"
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UserError(
            problem="the first line is of no known format",
            where=where,
            mend=f'{HEADER}, or {{"timestamp": 0, "input_length": 600, "output_length": 20}}',
        )
    return "agentic" if row.get("session_id") is not None else "mooncake"


def _with_known_times(rows: Iterable[tuple[str, Recorded]]) -> Iterator[tuple[str, int, Recorded]]:
    """Put in the earliest time at which requests may be due, as the file has it for them and the turns before
    them."""
    of_session: dict[str, int] = {}
    for where, row in rows:
        at_ns = row.at_ns or 0
        if row.session is not None:
            at_ns = max(of_session.get(row.session, at_ns), at_ns)
            of_session[row.session] = at_ns
        yield where, at_ns, row


def _rows(path: Path, format: TraceFormat | None) -> Iterator[tuple[str, Recorded]]:
    """Yield requests with where they stand."""
    if format is not None and format not in _PARSERS:
        raise UserError(problem=f"no trace format {format!r}", mend=f"one of {', '.join(FORMATS)}")
    parser = _PARSERS[format or find_format(path)]()
    for where, line in _lines(path):
        row = parser.parse(line, where)
        if row is not None:
            yield where, row


def _lines(path: Path) -> Generator[tuple[str, str], None, None]:
    """Yield lines that are not blank, with where they stand. Raises UserError."""
    number = 0
    try:
        with open_plain(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    problem = f"a line of more than {MAX_LINE_BYTES:,} bytes"
                    raise UserError(problem=problem, where=f"{path}:{number}", mend="one request per line")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{path}:{number}", text
    except UnicodeDecodeError as error:
        raise UserError(
            problem=f"not UTF-8: {error}", where=f"{path}:{number}", mend="a text file, uncompressed"
        ) from error
    except OSError as error:
        raise UserError(problem=f"cannot read the trace: {error}", where=str(path)) from error
