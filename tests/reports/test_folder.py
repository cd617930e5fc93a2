"""A run's folder: one run at a time, the same run when resumed, and what is kept of earlier sessions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from rayk.reports import ResultWriter, load
from rayk.reports.columns import (
    CELL_FIELDS,
    DRAFTED,
    OFFLOADED,
    REQUEST_FIELDS,
    TRANSFER_FIELDS,
    incidental_columns,
)
from rayk.reports.files import locked, remove_leftovers
from rayk.reports.folder import check_directory, differences
from rayk.reports.journal import Journal, read_journal
from rayk.types.errors import UserError
from rayk.types.rows import CellRow
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows, write_run

HOLDER = """
import sys, time
from pathlib import Path
from rayk.reports.files import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def open_writer(folder: Path, *, resume: bool = True, **facts: Any) -> ResultWriter:
    return ResultWriter(folder, spec_yaml=SPEC, environment={"started": "now", **facts}, resume=resume)


def write_cells(writer: ResultWriter, *decodes: int) -> list[CellRow]:
    cells = [cell_row(1, d, ("BHLNC", "BHLNC")) for d in decodes]
    for cell in cells:
        draw = random.Random(0)
        writer.write_cell(cell, request_rows(cell, draw), transfer_rows(cell, draw))
    return cells


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with (
        pytest.raises(UserError, match=f"another run is writing here .process {holder.pid} on"),
        locked(folder),
    ):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert (folder / ".lock").exists(), "a killed run leaves its lock file, but not its lock"
    with locked(folder):
        assert f"process {os.getpid()} on" in (folder / ".lock").read_text()
    assert not (folder / ".lock").exists()


def test_threads_exclude_each_other_and_no_lock_file_is_lost(tmp_path: Path) -> None:
    inside: list[int] = []
    refused: list[int] = []
    entered: list[int] = []

    def contend(number: int) -> None:
        for _ in range(60):
            try:
                with locked(tmp_path):
                    inside.append(number)
                    assert inside == [number]
                    inside.remove(number)
                    entered.append(number)
            except UserError:
                refused.append(number)

    threads = [threading.Thread(target=contend, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) + len(refused) == 240
    assert entered
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write here"), locked(Path("/proc/self")):
        pass
    with pytest.raises(UserError, match="cannot create"), locked(tmp_path / "file" / "run"):
        pass


# --- the same run ---------------------------------------------------------------------------------


def test_changed_inputs_are_named(tmp_path: Path) -> None:
    before = {"checkpoints/m": "aa", "p.jsonl": "bb"}
    write_cells(open_writer(tmp_path, resume=False, inputs=before), 1)
    with pytest.raises(UserError, match=r"changed since the run began: p\.jsonl\n"):
        check_directory(tmp_path, SPEC, resume=True, inputs={**before, "p.jsonl": "cc"})
    with pytest.raises(UserError, match=r"changed since the run began: checkpoints/m"):
        open_writer(tmp_path, inputs={**before, "checkpoints/m": "ab"})
    assert open_writer(tmp_path, inputs=before).finished


def test_differing_keys_are_named_with_both_values() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "d": "x" * 50, "e": None}
    now = {"a": {"b": 2, "c": [1, 2]}, "d": "y", "f": True}
    assert differences(before, now) == ["a.b (1, now 2)", "d", "f (None, now True)"]
    assert differences(before, before) == []


def test_keys_added_since_have_their_defaults(tmp_path: Path) -> None:
    from rayk.specs import dump_spec, load_spec, renew_spec

    spec = dump_spec(load_spec({"name": "n", "model": "m", "prompts": {"random": {}}}).spec)
    older = yaml.safe_load(spec)
    del older["sampling"], older["engine"]["num_blocks"]
    write_cells(ResultWriter(tmp_path, spec_yaml=yaml.safe_dump(older), environment={}), 1)
    check_directory(tmp_path, spec, resume=True, renew=renew_spec)
    with pytest.raises(UserError, match=r"differs from the run's in sampling\.max_tokens \(24, now 7\)"):
        check_directory(
            tmp_path, spec.replace("max_tokens: 24", "max_tokens: 7"), resume=True, renew=renew_spec
        )
    assert renew_spec("no: spec") == "no: spec"
    assert renew_spec("[") == "["


@pytest.mark.parametrize("content", [None, "a: [", "[1, 2]"])
def test_a_run_whose_spec_cannot_be_read_is_not_resumed(tmp_path: Path, content: str | None) -> None:
    write_cells(open_writer(tmp_path, resume=False), 1)
    (tmp_path / "spec.yaml").unlink()
    if content is not None:
        (tmp_path / "spec.yaml").write_text(content)
    with pytest.raises(UserError, match=r"spec\.yaml: cannot resume"):
        check_directory(tmp_path, SPEC, resume=True)


@pytest.mark.parametrize("name", ["cells", "requests", "transfers"])
def test_a_damaged_table_is_not_resumed(tmp_path: Path, name: str) -> None:
    write_cells(open_writer(tmp_path, resume=False), 1)
    path = tmp_path / f"{name}.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{name}\.parquet: cannot resume: cannot read the table"):
        open_writer(tmp_path)


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["requests", "transfers"])
def test_a_cell_without_all_its_rows_is_not_finished(tmp_path: Path, lost: str) -> None:
    _, second = write_cells(open_writer(tmp_path, resume=False), 1, 2)
    path = tmp_path / f"{lost}.parquet"
    rows = pd.read_parquet(path)
    rows[rows["cell_id"] != second.cell_id].to_parquet(path)
    writer = open_writer(tmp_path)
    assert len(writer.finished) == 1
    assert second.cell_id not in writer.finished
    assert len(load(tmp_path).cells) == 1, "said at once"
    write_cells(writer, 2)
    result = load(tmp_path)
    assert result.requests["cell_id"].value_counts().tolist() == [6, 6]
    assert result.transfers["cell_id"].value_counts().tolist() == [12, 6]


def test_rows_that_no_cell_names_are_not_shown(tmp_path: Path) -> None:
    write_cells(open_writer(tmp_path, resume=False), 1)
    cells = (tmp_path / "cells.parquet").read_bytes()
    write_cells(open_writer(tmp_path), 2)
    (tmp_path / "cells.parquet").write_bytes(cells)
    result = load(tmp_path)
    assert len(result.requests) == 6
    assert set(result.transfers["cell_id"]) == set(result.cells["cell_id"])


def test_earlier_sessions_stay_in_the_environment(tmp_path: Path) -> None:
    facts = {"git_commit": "a", "packages": {"torch": "1"}, "command": ["rayk"]}
    write_cells(open_writer(tmp_path, resume=False, **facts), 1)
    again = open_writer(tmp_path, **facts)
    assert again.changed_facts == []
    write_cells(again, 2)
    third = open_writer(tmp_path, **facts | {"packages": {"torch": "2"}})
    assert third.changed_facts == ["packages.torch ('1', now '2')"]
    third.write_environment({"started": "now", "workers": {}})
    environment = json.loads((tmp_path / "environment.json").read_text())
    first, second = environment["sessions"]
    assert (first["finished_cells"], second["finished_cells"]) == (1, 2)
    assert "packages" not in first
    assert second["packages"] == {"torch": "1"}
    page = third.finish().read_text()
    assert "sessions 2 packages torch" in page
    assert "sessions 1 command" in page


def test_temporary_files_of_dead_writers_go_and_others_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = f".cells.parquet.{os.getppid()}.tmp"
    for name in (f".cells.parquet.{dead.pid}.tmp", alive, ".notes.tmp", "cells.parquet"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([alive, ".notes.tmp", "cells.parquet"])


def test_a_torn_line_of_the_journal_is_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("begin", cell_id="c")
    journal.close()
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "com')
    journal = Journal(tmp_path)
    journal.note("open", finished=0)
    journal.close()
    assert [line["event"] for line in read_journal(tmp_path)] == ["begin", "open"]


def test_an_axis_of_numbers_and_texts_is_a_column_of_texts(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, resume=False)
    for i, share in enumerate((0.5, "auto", 1.0)):
        if i == 2:
            writer = open_writer(tmp_path)
        cell = cell_row(1, 1, ("BHLNC", "BHLNC"), cell_id=f"c{i}")
        cell.axes["gpus_per_worker"] = share
        writer.write_cell(cell, [], [])
    assert load(tmp_path).cells["gpus_per_worker"].tolist() == ["0.5", "auto", "1.0"]


def test_columns_of_times_are_known(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = load(tmp_path)
    assert incidental_columns("cells", [*result.cells.columns, "deadlines.cell_s"]) == [
        c
        for c in result.cells.columns
        if c.endswith(("_ms_p50", "_ms_p99", "_per_s", "wall_s", ".node", "digest_percent", "_peak_bytes"))
        or c in (*OFFLOADED, *DRAFTED)
        or c in ("num_host_tokens", "num_disk_tokens", "num_swaps", "reference_kept_since")
    ]
    found = incidental_columns("requests", result.requests.columns)
    assert {"ttft_ms", "itl_ms", "e2e_ms", "stage_queue_ns", "stage_decode_ns"} <= set(found)
    times = [
        "post_ms",
        "transfer_ms",
        "begin_ms",
        "end_ms",
        "gb_per_s",
        "repack_ms",
        "convert_ms",
        "digest_ms",
    ]
    assert incidental_columns("transfers", result.transfers.columns) == times
    for fields in (CELL_FIELDS, REQUEST_FIELDS, TRANSFER_FIELDS):
        assert "cell_id" in fields
