"""Traces are read as their publishers wrote them, whole and as a stream; bad lines are named."""

from __future__ import annotations

import json
import tracemalloc
from datetime import datetime
from pathlib import Path

import pytest

from rayk.traces import Recorded, TraceFormat, read_trace, stream_trace
from rayk.traces.reading import find_format
from rayk.types.errors import UserError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = {"timestamp": 3000, "input_length": 1300, "output_length": 100, "hash_ids": [0, 7, 9]}


def write_lines(path: Path, rows: list[object]) -> Path:
    """Write objects as JSON, and texts as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_azures_traces_of_both_years_are_read(tmp_path: Path) -> None:
    """The first lines of AzureLLMInferenceTrace_conv.csv, with its 100 ns ticks, and times as in 2024's."""
    old = write_lines(
        tmp_path / "2023.csv",
        [
            HEADER,
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
            "2023-11-16 18:16:46.6805901,20000,5000",
        ],
    )
    assert find_format(old) == "azure"
    rows = read_trace(old)
    assert [row.at_ns for row in rows] == [0, 4_314_579_000, 60_000_000_100]
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (20000, 5000),
    ]
    assert all(row.hash_ids == () and row.session is None for row in rows)
    times = ["2024-05-10 23:59:59.009930+00:00", "2024-05-11 00:00:05+00:00"]
    new = write_lines(tmp_path / "2024.csv", ["\ufeff" + HEADER, *(f"{at},2162,5\r" for at in times)])
    gap = datetime.fromisoformat(times[1]) - datetime.fromisoformat(times[0])
    assert [row.at_ns for row in stream_trace(new)] == [0, round(gap.total_seconds() * 1e6) * 1000]


def test_an_azure_trace_out_of_order_begins_with_its_earliest(tmp_path: Path) -> None:
    lines = [HEADER, "2023-11-16 18:15:02,20,2", "2023-11-16 18:15:00.5,10,1", "2023-11-16 18:15:03,30,3"]
    path = write_lines(tmp_path / "a.csv", list(lines))
    rows = read_trace(path)
    assert [(row.at_ns, row.num_prompt_tokens) for row in rows] == [
        (0, 10),
        (1_500_000_000, 20),
        (2_500_000_000, 30),
    ]
    assert read_trace(path, limit=2) == rows[:2]
    with pytest.raises(UserError, match="must be in order") as raised:
        list(stream_trace(path))
    assert raised.value.where == f"{path}:3"


SESSIONS = [
    {"session_id": "a", "timestamp": 1000, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]},
    {"session_id": "a", "delay": 2500.5, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 5, "output_length": 1},
    {"session_id": "a", "timestamp": 9000, "input_length": 1200, "output_length": 30},
    {"session_id": "b", "timestamp": 0, "input_length": 7, "output_length": 1, "delay": 3},
]


def test_turns_of_a_session_stand_behind_one_another(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "agents.jsonl", list(SESSIONS))
    assert find_format(path) == "agentic"
    rows = read_trace(path)
    assert [(row.session, row.num_prompt_tokens) for row in rows] == [
        ("b", 7),
        ("a", 600),
        ("a", 1100),
        (None, 5),
        ("a", 1200),
    ]
    assert [(row.at_ns, row.delay_ns) for row in rows if row.session == "a"] == [
        (1_000_000_000, 0),
        (None, 2_500_500_000),
        (9_000_000_000, 0),
    ]
    assert (rows[0].at_ns, rows[0].delay_ns) == (0, 0), "a first turn has no answer before it"
    assert read_trace(path, limit=3) == rows[:3]
    with pytest.raises(UserError, match="must be in order") as raised:
        list(stream_trace(path))
    assert raised.value.where == f"{path}:5"
    in_order = write_lines(path, [SESSIONS[i] for i in (4, 0, 1, 3, 2)])
    assert [row.num_prompt_tokens for row in stream_trace(in_order)] == [7, 600, 1100, 1200, 5]
    late = write_lines(path, [SESSIONS[i] for i in (0, 2, 1)])
    with pytest.raises(UserError, match="must be in order"):
        list(stream_trace(late))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("nonsense", "not JSON"),
        ([1], "not an object"),
        ({"timestamp": 0, "input_length": 10}, "output_length None"),
        ({"timestamp": -1, "input_length": 10, "output_length": 1}, "timestamp -1"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "input_length 0"),
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1, 2]}, "at most 1 blocks"),
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": "12"}, "hash_ids"),
        ({"timestamp": True, "input_length": 10, "output_length": 1}, "timestamp True"),
        (ROW | {"session_id": "a"}, "session_id in a trace without sessions"),
        (ROW | {"messages": []}, "lengths, and no texts"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, row: object, says: str) -> None:
    refused(write_lines(tmp_path / "trace.jsonl", [ROW, row]), says, 2)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_length": 10, "output_length": 1, "session_id": "new"}, "timestamp None"),
        (ROW | {"session_id": 7}, "session_id 7"),
        (ROW | {"session_id": "a", "delay": -1}, "delay -1"),
        (ROW | {"delay": 1}, "delay in a trace without sessions"),
    ],
)
def test_a_bad_turn_is_named(tmp_path: Path, row: object, says: str) -> None:
    refused(write_lines(tmp_path / "agents.jsonl", [*SESSIONS[:4], row]), says, 5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:15:46.68,374", "2 columns"),
        ("2023-13-16 18:15:46.68,374,44", "TIMESTAMP '2023-13-16"),
        ("yesterday,374,44", "TIMESTAMP 'yesterday'"),
        ("2023-11-16 18:15:46+02:00,374,44", "TIMESTAMP"),
        ("2023-11-16 18:15:46,3.5,44", "ContextTokens '3.5'"),
        ("2023-11-16 18:15:46,374,0", "GeneratedTokens 0"),
        ("2023-11-16 18:15:46,374,-4", "GeneratedTokens '-4'"),
    ],
)
def test_a_bad_row_of_azures_is_named(tmp_path: Path, line: str, says: str) -> None:
    refused(write_lines(tmp_path / "a.csv", [HEADER, "2023-11-16 18:15:46,374,44", line]), says, 3)


def refused(path: Path, says: str, line: int) -> None:
    """See that both ways of reading refuse a file, name the line and say how to mend it."""
    for read in (read_trace, lambda path: list(stream_trace(path))):
        with pytest.raises(UserError, match=says) as raised:
            read(path)
        assert raised.value.where == f"{path}:{line}"
        assert raised.value.mend


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    cases: list[tuple[bytes, TraceFormat | None, str]] = [
        (b"\n\n", None, "empty"),
        (HEADER.encode() + b"\n", None, "empty"),
        (b"a,b,c\n", None, "no known format"),
        (b"a,b,c\n", "azure", "the header is 'a,b,c"),
        (json.dumps(ROW).encode() + b"\n\xff\n", None, "not UTF-8"),
        (json.dumps(ROW).encode(), "azure", "the header is"),
        (HEADER.encode() + b"\n", "mooncake", "not JSON"),
    ]
    for content, name, says in cases:
        path.write_bytes(content)
        with pytest.raises(UserError, match=says):
            read_trace(path, format=name)
    with pytest.raises(UserError, match="cannot read"):
        read_trace(tmp_path / "none")
    with pytest.raises(UserError, match="no trace format"):
        read_trace(path, format="burst")  # type: ignore[arg-type]


def test_a_stream_holds_no_rows(tmp_path: Path) -> None:
    """The list of 4,000 rows would take more than 2 MB."""
    path = tmp_path / "long.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(4_000):
            row = {
                "timestamp": i,
                "input_length": 5000,
                "output_length": 9,
                "hash_ids": list(range(i, i + 9)),
            }
            file.write(json.dumps(row) + "\n")
    tracemalloc.start()
    try:
        last = None
        for row in stream_trace(path):
            last = row
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(last, Recorded)
    assert last.at_ns == 3_999_000_000
    assert peak < 1 << 19
