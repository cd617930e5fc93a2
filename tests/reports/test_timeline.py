"""The trace of a run says what its tables say: every span's start and length, in a format Perfetto takes."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.reports import Result, ResultWriter, load
from rayk.reports.columns import STAGES
from rayk.reports.timeline import CATEGORIES, spans_of, timeline_events, write_timeline
from rayk.types.rows import RequestRow
from tests.reports.synthetic import MS, SPEC, cell_row, request_rows, transfer_rows

BEFORE = ("queue", "dispatch")
PREFILLED = ("lookup", "load", "prefill_queue", "prefill", "ticket", "digest", "relay", "handover")
READ = ("read", "fence", "verify", "notice", "retry", "decode_queue", "swap", "decode")
HANDED_OVER = (*BEFORE, *PREFILLED, "reserve", *READ)
PUSHED = (*BEFORE, "reserve", *PREFILLED, *READ)


def staged(row: RequestRow, draw: random.Random) -> RequestRow:
    """The row with stages of whole ns that add up to its E2E."""
    row.due_ns = draw.randrange(0, 3 * MS)
    row.stage_ns = {stage: draw.randrange(0, 2 * MS) for stage in STAGES[:-1]}
    before = sum(row.stage_ns.values())
    row.token_times_ns = [row.arrival_ns + before + i * MS + draw.randrange(MS) for i in range(24)]
    row.stage_ns["decode"] = row.token_times_ns[-1] - row.arrival_ns - before
    return row


@pytest.fixture
def run(tmp_path: Path) -> Result:
    """A pull, a push and an aggregated cell of six requests, two of which failed early."""
    draw = random.Random(7)
    writer = ResultWriter(tmp_path / "run", spec_yaml=SPEC, environment={})
    for cell in (
        cell_row(1, 2, ("BHLNC", "BHLNC")),
        cell_row(2, 1, ("BHLNC", "BHLNC")),
        cell_row(2, None, ("BHLNC", "")),
    ):
        cell.axes["transfer.mode"] = "push" if cell.axes["prefill.tp"] == 2 else "pull"
        rows = [staged(row, draw) for row in request_rows(cell, draw)]
        if cell.axes["decode.tp"] is None:
            for row in rows:
                row.stage_ns = {k: row.stage_ns[k] for k in ("queue", "prefill", "decode")}
                row.decode_engine = "prefill0"
        rows[4].stage_ns, rows[4].token_times_ns, rows[4].error = {"queue": 5}, [], "DeadlineExceeded: x"
        rows[5].stage_ns, rows[5].token_times_ns, rows[5].prefill_engine = {}, [], None
        writer.write_cell(cell, rows, transfer_rows(cell, draw))
    writer.close()
    return load(tmp_path / "run")


def expected_spans(row: dict[str, Any], stages: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """By brute force: a stage starts after all those before it."""
    known = [s for s in stages if not pd.isna(row[f"stage_{s}_ns"])]
    lengths = [int(row[f"stage_{s}_ns"]) for s in known]
    return [(s, sum(lengths[:i]), lengths[i]) for i, s in enumerate(known)]


def ns(microseconds: float) -> int:
    """Whole ns of a trace's time; they are there exactly."""
    assert abs(microseconds * 1e3 - round(microseconds * 1e3)) < 1e-3
    return round(microseconds * 1e3)


def test_every_span_starts_and_lasts_as_the_table_says(run: Result) -> None:
    events = list(timeline_events(run))
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(pids) == {"coordinator", "prefill0", "decode0"}
    cells = [e for e in events if e.get("cat") == "cell"]
    assert [c["name"] for c in cells] == list(run.cells["cell_id"])
    num_seen = 0
    for cell in cells:
        mode = run.cells.set_index("cell_id").loc[cell["name"], "transfer.mode"]
        begin, end = ns(cell["ts"]), ns(cell["ts"] + cell["dur"])
        inside = [e for e in events if e["ph"] == "X" and begin <= ns(e["ts"]) <= end and e is not cell]
        of_requests = {e["name"]: e for e in inside if e["cat"] == "request"}
        rows = run.requests[run.requests["cell_id"] == cell["name"]].to_dict("records")
        assert set(of_requests) == {row["request_id"] for row in rows}
        for row in rows:
            whole = of_requests[row["request_id"]]
            due = begin + round(row["due_ms"] * 1e6)
            assert ns(whole["ts"]) == due
            if not pd.isna(row["e2e_ms"]):
                assert ns(whole["dur"]) == round(row["e2e_ms"] * 1e6)
            found = [
                (e["name"], ns(e["ts"]) - due, ns(e["dur"]))
                for e in inside
                if e["cat"] != "request" and e["args"]["request"] == row["request_id"]
            ]
            assert found == expected_spans(row, PUSHED if mode == "push" else HANDED_OVER)
            num_seen += len(found)
    assert num_seen == 4 * (19 + 19 + 3) + 3  # the failed ones have a queue, or nothing
    assert num_seen == sum(e["ph"] == "X" and e["cat"] not in ("cell", "request") for e in events)


def test_spans_are_where_their_engines_are(run: Result) -> None:
    events = list(timeline_events(run))
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    at = defaultdict(set)
    for e in events:
        if e["ph"] == "X":
            at[e["name"]].add(e["pid"])
    assert at["queue"] == at["handover"] == {pids["coordinator"]}
    assert at["prefill"] == at["digest"] == {pids["prefill0"]}
    assert at["read"] == at["verify"] == {pids["decode0"]}
    assert at["decode"] == {pids["decode0"], pids["prefill0"]}  # the latter of the aggregated cell
    flows = [e for e in events if e["name"] == "kv"]
    assert len(flows) == 2 * 2 * 4
    assert {e["pid"] for e in flows if e["ph"] == "s"} == {pids["prefill0"]}
    assert {e["pid"] for e in flows if e["ph"] == "f"} == {pids["decode0"]}


def test_reads_tell_what_their_transfers_moved(run: Result) -> None:
    cell = run.cells["cell_id"][0]
    moved = run.transfers[run.transfers["cell_id"] == cell]
    reads = [e for e in timeline_events(run) if e["name"] == "read"][:4]
    for read in reads:
        rows = moved[moved["request_id"] == read["args"]["request"]]
        assert len(rows) == read["args"]["num_transfers"] == 2
        assert read["args"]["bytes"] == rows["bytes"].sum()
        assert read["args"]["max_transfer_ms"] == rows["transfer_ms"].max()


def test_what_lies_between_two_attempts_is_of_no_stage() -> None:
    row = {"num_attempts": 2, "e2e_ms": 10.0, "stage_queue_ns": MS, "stage_prefill_ns": 2 * MS}
    row |= {"stage_decode_ns": 4 * MS}
    assert [(s.stage, s.start_ns, s.length_ns) for s in spans_of(row)] == [
        ("queue", 0, MS),
        ("prefill", MS, 2 * MS),
        ("decode", 6 * MS, 4 * MS),
    ]


REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
}
"""Fields per phase, of the Trace Event Format."""
METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_sort_index": {"sort_index": int},
}
"""Of those that the format knows, the ones that we use, with what they are to say."""
Row = tuple[int, int]
"""Process and thread."""
Slice = tuple[int, int, str]
"""Start, end and name."""


def refuse(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def exact_ns(microseconds: int | Decimal) -> int:
    """As Perfetto reads them: digits behind the third are cut, so there must be none."""
    found = microseconds * 1000
    assert found == int(found) >= 0, microseconds
    return int(found)


def check_event(event: dict[str, Any]) -> None:
    """Its fields are those of its phase, of the types that the format has."""
    assert set(event) == REQUIRED[event["ph"]] | {"ph"}
    assert type(event["pid"]) is type(event["tid"]) is int
    assert type(event["name"]) is str
    assert event["name"]
    if event["ph"] == "M":
        assert {key: type(value) for key, value in event["args"].items()} == METADATA[event["name"]]
        return
    assert type(event["cat"]) is str
    exact_ns(event["ts"])
    if event["ph"] in "sf":  # a text would have to be hexadecimal for Perfetto
        assert type(event["id"]) is int
    else:
        assert event.get("s", "t") in ("g", "p", "t")
    assert event.get("bp", "e") == "e"
    assert type(event.get("args", {})) is dict


def check_nesting(slices: list[Slice]) -> None:
    """No two of a row overlap but one that holds the other and comes first: viewers drop what does."""
    open_until: list[int] = []
    for start, end, name in sorted(slices, key=lambda s: s[0]):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], name
        open_until.append(end)


def bound_slice(slices: list[Slice], at_ns: int) -> str:
    """The name of the slice that a flow event belongs to: the innermost around it."""
    around = [s for s in slices if s[0] <= at_ns < s[1]]
    return max(around, key=lambda s: (s[0], -s[1]))[2]


def check_format(path: Path) -> None:
    """The file is a trace as the Trace Event Format has it: fields and their types, exact times, rows with
    names, slices that nest, and flows in pairs, forward in time, from slice to slice."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal, parse_constant=refuse)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices: dict[Row, list[Slice]] = defaultdict(list)
    named: dict[Row, set[str]] = defaultdict(set)
    flows: dict[tuple[str, str, int], list[tuple[str, int, Row]]] = defaultdict(list)
    rows: set[Row] = set()
    for event in document["traceEvents"]:
        check_event(event)
        row = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] not in named[row], "named twice"
            named[row].add(event["name"])
            continue
        rows.add(row)
        start = exact_ns(event["ts"])
        if event["ph"] == "X":
            slices[row].append((start, start + exact_ns(event["dur"]), event["name"]))
        elif event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append((event["ph"], start, row))
    with_name = {pid for (pid, _), names in named.items() if "process_name" in names}
    assert all("thread_name" in named[row] and row[0] in with_name for row in rows)
    # Perfetto shows row 0 as the process's own.
    assert len({tid for _, tid in rows}) == len(rows)
    assert all(tid > 0 for _, tid in rows)
    for of_row in slices.values():
        check_nesting(of_row)
    assert flows
    for begin, end in flows.values():
        assert (begin[0], end[0]) == ("s", "f")
        assert begin[1] <= end[1]
        assert bound_slice(slices[begin[2]], begin[1]) == "prefill"
        assert bound_slice(slices[end[2]], end[1]) == "read"


def test_the_file_is_one_that_perfetto_takes(run: Result, tmp_path: Path) -> None:
    check_format(write_timeline(run, tmp_path / "t.json"))
    assert set(CATEGORIES) < set(STAGES)


def test_the_command_writes_it(run: Result) -> None:
    result = CliRunner().invoke(app, ["report", str(run.directory), "--format", "trace"])
    assert result.exit_code == 0, result.output
    assert run.directory is not None
    path = run.directory / "timeline.json"
    assert result.output.strip() == str(path)
    check_format(path)
