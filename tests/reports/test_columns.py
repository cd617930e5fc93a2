"""What is said of columns: of every one that is written, in units that its name ends in, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayk.bench.client import OK, Observed
from rayk.bench.generator import Sent
from rayk.bench.load import Load
from rayk.bench.prompts import Planned
from rayk.bench.summary import summarize
from rayk.cli.main import app
from rayk.reports import load
from rayk.reports.dictionary import TABLES, columns_csv, columns_json, columns_markdown, columns_text
from rayk.reports.load_writer import LoadWriter
from rayk.types.slo import parse_slo
from tests.reports.synthetic import write_run

UNITS = {
    "_ms": "ms",
    "_ns": "ns",
    "_us": "us",
    "_s": "s",
    "_bytes": "bytes",
    "_percent": "%",
    "_gb_per_s": "GB/s",
    "gb_per_s": "GB/s",
    "_tokens_per_s": "tokens/s",
    "_per_s": "requests/s",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_requests": "requests",
    "_share": "share",
    "_ids": "token ids",
}
"""What a name ends in -> its unit; the longest one counts."""
STATISTIC = re.compile(r"_(p\d+|mean)(_low|_high)?$")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("columns") / "run").parent


def write_load(folder: Path, num_requests: int = 60) -> Path:
    """A bench of one load whose server answers in 20 ms and a token every 5 ms."""
    asked = Load(url="http://127.0.0.1:9", rate=100.0, num_requests=num_requests, slo=parse_slo("ttft=50ms"))
    sent = Sent(began_ns=0, ended_ns=10**7 * (num_requests + 20), cpu_ns=10**6)
    for i in range(num_requests):
        planned = Planned(index=i, due_ns=10**7 * i, prompt=[5, 6, 7 + i % 4], max_tokens=8, seed=i)
        seen = Observed(planned=planned, due_ns=10**7 * i, sent_ns=10**7 * i + 10**5, status=200, outcome=OK)
        seen.chunk_ns = [seen.due_ns + 2 * 10**7 + 5 * 10**6 * k + 1000 * i for k in range(8)]
        seen.chunk_tokens, seen.output_token_ids = [1] * 8, list(range(8))
        seen.ended_ns, seen.finish_reason = seen.chunk_ns[-1] + 10**5, "length"
        seen.usage = {"prompt_tokens": 3, "completion_tokens": 8, "cached_tokens": i % 2}
        sent.requests.append(seen)
    cell, rows = summarize(asked, "tiny", sent)
    writer = LoadWriter(folder, spec=[{"rate": 100.0}], environment={"started": "2026-11-22T10:00:00+00:00"})
    writer.write(cell, rows)
    return folder


def fields(table: str) -> dict[str, tuple[object, str, str]]:
    return {f.name: (f.kind, f.unit, f.meaning) for f in TABLES[table][1]}


@pytest.mark.parametrize("table", ["cells", "requests", "transfers"])
def test_every_column_of_a_run_is_told(run: Path, table: str) -> None:
    schema = pq.read_schema(run / f"{table}.parquet")
    told = fields(table)
    axes = ["mode", "prefill.tp", "decode.tp", "prefill.layout", "decode.layout"] if table == "cells" else []
    assert set(schema.names) - set(axes) == set(told)
    assert {name: schema.field(name).type for name in told} == {n: kind for n, (kind, _, _) in told.items()}


@pytest.mark.parametrize("table", ["cells", "requests"])
def test_every_column_of_a_load_is_told(tmp_path: Path, table: str) -> None:
    schema = pq.read_schema(write_load(tmp_path / "load") / f"{table}.parquet")
    told = fields(f"load {table}")
    assert set(schema.names) == set(told)
    assert {name: schema.field(name).type for name in told} == {n: kind for n, (kind, _, _) in told.items()}


@pytest.mark.parametrize("table", TABLES)
def test_units_are_those_that_names_end_in(table: str) -> None:
    names = [f.name for f in TABLES[table][1]]
    assert len(set(names)) == len(names)
    for name, (_, unit, meaning) in fields(table).items():
        assert meaning, name
        ends = [end for end in UNITS if STATISTIC.sub("", name).endswith(end)]
        if ends:
            assert unit == UNITS[max(ends, key=len)], name
        assert unit or not name.startswith("num_"), name


def test_every_format_tells_the_same() -> None:
    expected = [(t, f.name, f.unit, f.meaning) for t, (_, fs) in TABLES.items() for f in fs]
    rows = list(csv.DictReader(io.StringIO(columns_csv())))
    assert [(r["table"], r["column"], r["unit"], r["meaning"]) for r in rows] == expected
    told = json.loads(columns_json())
    assert [(t, c["column"], c["unit"] or "", c["meaning"]) for t, cs in told.items() for c in cs] == expected
    lines = columns_markdown().splitlines()
    assert len([line for line in lines if line.startswith("| `")]) == len(expected)
    plain = [
        line for line in columns_text().splitlines() if line and line not in {t for t, _ in TABLES.values()}
    ]
    assert [line.split()[0] for line in plain] == [name for _, name, _, _ in expected]
    assert all(line.endswith(meaning) for line, (_, _, _, meaning) in zip(plain, expected, strict=True))
    folded = columns_text(width=100)
    assert max(map(len, folded.splitlines())) <= 110
    assert re.sub(r"\s+", " ", folded) == re.sub(r"\s+", " ", columns_text())


def test_the_command_prints_them(run: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["report", "--columns"]).stdout == columns_text()  # no terminal: a line each
    assert runner.invoke(app, ["report", "--columns", "--format", "json"]).stdout == columns_json()
    for wrong in (
        ["--columns", str(run)],
        ["--columns", "--format", "html"],
        [],
        [str(run), "--format", "json"],
    ):
        found = runner.invoke(app, ["report", *wrong])
        assert found.exit_code == 2
        assert "mend: " in found.stderr or str(run) in wrong


def test_load_gives_frames_with_these_columns(run: Path) -> None:
    result = load(run)
    for table in ("cells", "requests", "transfers"):
        assert set(fields(table)) <= set(getattr(result, table).columns)
    assert result.cells["ttft_ms_p50"].tolist() == pytest.approx(
        result.requests.groupby("cell_id", sort=False)["ttft_ms"].median().tolist()
    )
