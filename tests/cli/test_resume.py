"""`rayk run --resume` and `rayk report`, without a cluster: cells the model cannot run need none."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.cli.progress import RunProgress
from rayk.reports import ResultWriter, load
from rayk.reports.files import locked
from rayk.reports.journal import read_journal
from tests.conftest import CheckpointFactory
from tests.markers import thorough
from tests.reports.synthetic import cell_row, write_run
from tests.specs.models import spec


@pytest.fixture
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


@pytest.fixture
def path(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec of two cells that are both UNSUPPORTED: the tiny model has 4 query heads."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = tmp_path / "e.yaml"
    matrix = {"prefill.tp": [3, 5]}
    found.write_text(yaml.safe_dump(spec(model=str(model), device="cpu", matrix=matrix), sort_keys=False))
    return found


def invoke(command: str, *arguments: object) -> Any:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def run(path: Path, out: Path, *options: object) -> Any:
    return invoke("run", path, "--out", out, *options)


def lose_a_cell(out: Path) -> None:
    """What a run looks like that was killed before its last cell was finished."""
    cells = pd.read_parquet(out / "cells.parquet")
    cells.iloc[:-1].to_parquet(out / "cells.parquet")


def test_a_full_disk_is_a_message_and_the_run_is_continued(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for the second cell's row: the first one's stands."""
    out, write = tmp_path / "run", pq.write_table
    writes_left = [True] * 5  # requests, transfers and cells of the first cell; two tables of the second

    def write_while_there_is_room(table: Any, where: Any) -> None:
        if not writes_left:
            Path(where).write_bytes(b"PAR1")  # what was written before the disk was full
            raise OSError(errno.ENOSPC, "No space left on device")
        writes_left.pop()
        write(table, where)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", write_while_there_is_room)
        full = run(path, out)
    assert full.exit_code == 2
    assert f"rayk: {out}: no room on the disk: [Errno 28] No space left on device" in full.stderr
    assert "mend: make room; --resume continues the run" in full.stderr
    assert "Traceback" not in full.output
    assert len(load(out).cells) == 1
    assert not list(out.glob(".*.tmp"))
    run(path, out, "--resume")
    assert len(load(out).cells) == 2


def test_a_run_is_continued_and_says_how_many_cells_are_left(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(path, out).exit_code == 2, "all cells are UNSUPPORTED"
    whole = load(out)
    lose_a_cell(out)
    again = run(path, out, "--resume")
    assert "resuming: 1 of 2 cells are on disk, 1 left" in again.stderr
    assert again.stderr.count("UNSUPPORTED") == 1
    assert load(out).cells["cell_id"].tolist() == whole.cells["cell_id"].tolist()
    done = run(path, out, "--resume")
    assert "resuming: 2 of 2 cells are on disk, 0 left" in done.stderr
    assert len(load(out).environment["sessions"]) == 2
    events = [line["event"] for line in read_journal(out)]
    assert events == ["open", "commit", "commit", "close", "open", "commit", "close", "open", "close"]


def test_resume_without_a_run_begins_one(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path / "new", "--resume")
    assert "resuming" not in result.stderr
    assert len(load(tmp_path / "new").cells) == 2


@thorough
def test_other_settings_are_named(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(path, out)
    before = (out / "cells.parquet").read_bytes()
    refused = run(path, out, "--resume", "--set", "sampling.max_tokens=7", "--set", "repeat=2")
    assert refused.exit_code == 2
    assert "differs from the run's in sampling.max_tokens (24, now 7), repeat (1, now 2)" in refused.stderr
    assert (out / "cells.parquet").read_bytes() == before
    assert run(out / "spec.yaml", out, "--resume").exit_code == 2, "the run's own spec is the same spec"
    assert "0 left" in run(out / "spec.yaml", out, "--resume").stderr


@thorough
def test_other_weights_under_the_same_path_are_refused(path: Path, tmp_path: Path, model: Path) -> None:
    copy, out = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(model, copy)
    run(path, out, "--set", f"model={copy}")
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    refused = run(path, out, "--set", f"model={copy}", "--resume")
    assert refused.exit_code == 2
    assert f"cannot resume: changed since the run began: {copy}" in refused.stderr
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "0 left" in run(path, out, "--set", f"model={copy}", "--resume").stderr


def test_other_prompts_in_the_same_file_are_refused(path: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "run"
    prompts.write_text('{"prompt_token_ids": [1, 2]}\n')
    option = ("--set", f"prompts.file={prompts}")
    run(path, out, *option)
    assert prompts.name in " ".join(load(out).environment["inputs"])
    prompts.write_text('{"prompt_token_ids": [1, 3]}\n')
    refused = run(path, out, *option, "--resume")
    assert refused.exit_code == 2
    assert f"changed since the run began: {prompts}" in refused.stderr


def test_a_folder_that_another_run_fills_is_refused(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with locked(out):
        refused = run(path, out)
    assert refused.exit_code == 2
    assert "another run is writing here (process" in refused.stderr
    assert not list(out.glob("*.parquet"))


def test_an_exclude_rule_that_matches_nothing_is_a_warning(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path / "run", "--set", "exclude=[{prefill.tp: 7}, {prefill.tp: 5}]")
    assert result.stderr.count("rayk: warning: ") == 1
    assert "this exclude rule matches no cell: {'prefill.tp': 7}" in result.stderr
    assert len(load(tmp_path / "run").cells) == 1


@thorough
def test_cells_of_another_machine_are_a_warning(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(path, out)
    lose_a_cell(out)
    environment = json.loads((out / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (out / "environment.json").write_text(json.dumps(environment))
    warned = run(path, out, "--resume")
    assert "measured elsewhere or with other versions: packages.torch ('1.0', now" in warned.stderr
    assert load(out).environment["sessions"][0]["packages"]["torch"] == "1.0"


def test_progress_says_what_was_done() -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = RunProgress(console)
    assert progress.summary() == "no cell was planned yet"
    with progress:
        progress.plan(5, 2)
        progress.phase("starting Ray")
        progress.begin("c")
        progress.end("c", "PASS", "")
        progress.interrupted()
    assert progress.summary() == "3 of 5 cells are finished"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "resuming: 2 of 5 cells are on disk, 3 left" in text
    assert text.index("starting Ray\n") < text.index("3/5 PASS")
    assert "once more to stop at once" in text


def test_the_bar_counts_cells_and_verdicts() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with RunProgress(console) as progress:
        progress.plan(4, 0)
        for name, verdict in (("a", "PASS"), ("b", "KV_MISMATCH"), ("c", "PASS")):
            progress.begin(f"{name}-input_tokens=[bold]")
            progress.end(name, verdict, "")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    bar = [line for line in drawn.splitlines() if "3/4" in line][-1]
    assert "c-input_tokens=[bold]" in bar
    assert re.search(r"3/4 +2 PASS 1 KV_MISMATCH +0:00:\d\d +ETA", bar)


def test_plain_lines_say_how_long_the_rest_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rayk.cli.progress.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    with RunProgress(console) as progress:
        progress.plan(6, 1)
        progress.end("u", "UNSUPPORTED", "no such model")
        now[0] += 500  # workers start
        for name, seconds in (("a", 10.0), ("b", 30.0), ("c", 50.0), ("d", 1.0)):
            progress.begin(name)
            now[0] += seconds
            progress.end(name, "PASS", "")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (
        [line.split(", ETA ")[1:] for line in lines if line[1:3] == "/6"]
        == [
            [],  # nothing is known yet
            ["0:00:30"],
            ["0:00:40"],
            ["0:00:30"],
            [],  # nothing is left
        ][: len(lines)]
    )


# --- report ---------------------------------------------------------------------------------------


def test_report_writes_into_a_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "out").mkdir()
    written = invoke("report", tmp_path / "a", tmp_path / "a", "--out", tmp_path / "out")
    assert written.stdout.strip() == str(tmp_path / "out" / "compare.html")
    (tmp_path / "file").write_text("")
    refused = invoke("report", tmp_path / "a", "--format", "csv", "--out", tmp_path / "file")
    assert refused.exit_code == 2
    assert "cannot create" in refused.stderr


def test_report_of_an_unfinished_run(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path / "run", spec_yaml="name: n\nmodel: m\n", environment={})
    early = invoke("report", tmp_path / "run")
    assert early.exit_code == 2
    assert "no cell of this run is finished" in early.stderr
    writer.write_cell(cell_row(1, 2, ("BHLNC", "BHLNC")), [], [])
    assert invoke("report", tmp_path / "run", "--format", "md", "--out", "-").stdout.startswith(
        "# 1 of 1 PASS"
    )
