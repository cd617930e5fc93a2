"""jobs/gpu_day.py on a bare machine, with a CPU standing in for the GPU; what interrupts it, and its page."""

from __future__ import annotations

import argparse
import csv
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jobs import gpu_day as job
from jobs.gpu import sanitizer
from jobs.gpu.rows import COLUMNS, Row, Rows
from jobs.gpu.stages import Bench, Lacking, Stage
from rayk.reports.gpu_day import is_gpu_day
from rayk.reports.report import write_html
from rayk.types.errors import UserError
from tests.markers import thorough
from tests.test_bare_machine import bare_environment

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["tests", "sanitizer", "attention", "tiles", "kernels", "engine", "nixl", "all-reduce"]


@thorough
def test_a_bare_machine_measures_every_stage_and_goes_on_where_it_was_left(tmp_path: Path) -> None:
    out, environ = tmp_path / "day", bare_environment(tmp_path)

    def run(*words: str) -> str:
        told = " ".join(["--device cpu --out", str(out), *words])
        command = ["make", "gpu-day", f"PY={sys.executable}", f"ARGS={told}"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run()
    rows = Rows(out).read()
    assert list(dict.fromkeys(row["stage"] for row in rows)) == STAGES
    assert {row["status"] for row in rows} == {"measured", "passed", "skipped"}
    assert {row["note"] for row in rows if row["stage"] == "nixl"} == {"skipped: no nixl"}
    sums = [(row["variant"], row["status"]) for row in rows if row["stage"] == "all-reduce"]
    assert sums == [("symmetric memory", "skipped"), ("gloo", "measured"), ("gloo", "measured")]
    assert {row["status"] for row in rows if row["stage"] in ("tiles", "kernels", "engine")} == {"measured"}
    assert sum(row["stage"] == "tests" and row["status"] == "passed" for row in rows) > 1
    with (out / "gpu-day.csv").open(newline="") as file:
        assert [tuple(line) for line in csv.reader(file)][0] == COLUMNS
    assert all(f"<h2>{stage}</h2>" in (out / "gpu-day.html").read_text() for stage in STAGES)

    lines = (out / "rows.jsonl").read_text().splitlines(keepends=True)
    gone = [line for line in lines if '"item": "digest"' in line]
    kept = [line for line in lines if line not in gone]
    assert len(kept) == len(lines) - 2, "a row, and the end of its item"
    (out / "rows.jsonl").write_text("".join([*kept, gone[0][:20]]))
    printed = run()
    assert printed.count("every row is there") == len(STAGES) - 1
    again = Rows(out).read()
    assert len(again) == len(rows)
    assert (again[-1]["item"], again[-1]["status"]) == ("digest", "measured")
    assert write_html(out, out / "report.html").stat().st_size > 100_000


def stage_of(measure: Callable[[str, Bench], Iterator[Row]], items: Sequence[str] = ("a", "b", "c")) -> Stage:
    return Stage(name="fake", about="nothing", items=lambda device: items, measure=measure)


def run_here(
    stage: Stage, rows: Rows, monkeypatch: pytest.MonkeyPatch, child: Callable[..., int | None] | None = None
) -> None:
    """Run a stage as the job does, its processes being calls in this one."""
    monkeypatch.setattr(job, "_child", child or (lambda stage, options, limit_s: stage.run(rows, "cpu")))
    options = argparse.Namespace(device="cpu", out=rows.folder, commit="")
    job.run_stage(stage, rows, options, time.monotonic() + 3600)


def test_an_item_that_fails_is_a_row_and_the_next_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(item: str, bench: Bench) -> Iterator[Row]:
        if item == "a":
            raise ValueError("an illegal address\nof a GPU")
        if item == "b":
            raise Lacking("such thing")
        yield Row(kernel=item, ms=2.0)
        yield Row(kernel=item, variant="other")

    rows = Rows(tmp_path, lambda: {"sm_mhz": 1980.0})
    run_here(stage_of(measure), rows, monkeypatch)
    found = [(row["item"], row["status"], row["note"], row["sm_mhz"]) for row in rows.read()]
    assert found == [
        ("a", "failed", "ValueError: an illegal address", 1980),
        ("b", "skipped", "skipped: no such thing", 1980),
        ("c", "measured", "", 1980),
        ("c", "measured", "", 1980),
    ]


def test_rows_are_on_disk_when_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an item that fails half way, or whose process ends there: that one is measured again, and the
    rows of the first time are told until then."""
    seen: list[list[str]] = []

    def measure(item: str, bench: Bench) -> Iterator[Row]:
        yield Row(kernel="first")
        seen.append([row["kernel"] for row in Rows(tmp_path).read()])
        if item == "fails":
            raise RuntimeError("later")
        if len(seen) == 2:
            raise KeyboardInterrupt
        yield Row(kernel="second")

    rows = Rows(tmp_path)
    run_here(stage_of(measure, ["fails"]), rows, monkeypatch)
    assert [row["status"] for row in rows.read()] == ["measured", "failed"]
    stage = stage_of(measure, ["fails", "killed"])
    with pytest.raises(KeyboardInterrupt):
        stage.run(rows, "cpu")
    assert stage.missing(rows, "cpu") == ["killed"]
    assert [row["kernel"] for row in rows.read()] == ["first", "fails", "first"]
    stage.run(rows, "cpu")
    assert [row["kernel"] for row in rows.read()] == ["first", "fails", "first", "second"]
    assert seen[0] == ["first"]
    assert stage.missing(rows, "cpu") == []


def test_what_never_ends_fails_once_and_what_was_only_cut_short_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(tmp_path)
    stage = stage_of(lambda item, bench: iter([Row(kernel=item)]))
    monkeypatch.setattr(job, "LIMIT_S", 1.0)

    def measures_one(stage: Stage, options: object, limit_s: float) -> None:
        rows.append("fake", "a", [Row(kernel="a")])

    run_here(stage, rows, monkeypatch, measures_one)
    assert stage.missing(rows, "cpu") == ["b", "c"]
    run_here(stage, rows, monkeypatch, lambda *rest: None)
    assert [(r["item"], r["status"]) for r in rows.read()] == [("a", "measured"), ("b", "failed")]
    # A crash without a word is the fault of the item that was measured.
    run_here(stage, rows, monkeypatch, lambda *rest: -9)
    assert rows.read()[-1]["note"] == "the process ended with status -9"


def test_a_process_that_outlasts_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"os.symlink(str(child.pid), {str(tmp_path / 'pid')!r})\n"
        "child.wait()\n"
    )
    options = argparse.Namespace(device="cpu", out=tmp_path, commit="", only=[])
    patch = pytest.MonkeyPatch()
    patch.setattr(job, "__file__", str(script))
    pid = tmp_path / "pid"
    try:
        limit_s = 5.0
        while not pid.is_symlink():  # a busy machine may take longer to start it
            assert job._child(stage_of(lambda *rest: iter(())), options, limit_s) is None
            limit_s *= 2
    finally:
        patch.undo()
    with suppress(ProcessLookupError):  # it is over already
        select.select([os.pidfd_open(int(str(pid.readlink())))], [], [])


def test_time_that_is_up_leaves_stages_for_another_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0", "--only", "kernels"]) == 0
    left = len(job.kernels.STAND_IN)
    assert f"kernels: {left} items left for another call" in capsys.readouterr().out
    assert is_gpu_day(tmp_path)


def test_a_word_names_what_has_it_in_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in the process that measures it."""
    asked = ["--device", "cpu", "--out", str(tmp_path), "--only", "decode", "nixl"]
    stages = job.chosen_stages(job.parsed(asked))
    items = {stage.name: stage.items("cpu") for stage in stages}
    assert list(items) == ["sanitizer", "attention", "tiles", "kernels", "engine", "nixl"]
    assert all("decode" in item for name, found in items.items() for item in found if name != "nixl")
    assert len(items["nixl"]) > 1
    assert job.main([*asked[:4], "--only", "fp8_e4m3", "--stage", "kernels"]) == 0
    assert [row["item"] for row in Rows(tmp_path).read()] == ["decode, fp8_e4m3"]
    with pytest.raises(SystemExit):
        job.parsed(["--device", "cpu", "--only", "dekode"])
    assert "names no stage (tests, sanitizer," in capsys.readouterr().err


CLEAN = "========= ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (f"3 passed in 2s\n{CLEAN}", 0, ("passed", 0)),
        ("3 passed in 2s\n========= RACECHECK SUMMARY: 2 hazards displayed", 0, ("failed", 2)),
        (f"1 failed in 2s\n{CLEAN}", 1, ("failed", 0)),
        ("3 passed in 2s", 0, ("failed", None)),
        (f"no tests ran\n{CLEAN}", 0, ("failed", 0)),
    ],
)
def test_the_sanitizers_words_are_judged(output: str, status: int, expected: tuple[str, Any]) -> None:
    row = sanitizer.judged("a", "memcheck", output, status)
    assert (row.status, row.value) == expected


def test_a_sanitizer_that_takes_too_long_ends_with_what_it_started(tmp_path: Path) -> None:
    """Else a test that holds the GPU, and the tool's output, outlive their row's time."""
    pid = tmp_path / "pid"
    script = f"echo begun; sleep 600 & ln -s $! {pid}; wait"
    output, status = sanitizer.run_within(2, ["bash", "-c", script], os.environ)
    assert sanitizer.judged("a", "racecheck", output, status).note == "not done within 2 s"
    assert "begun" in output
    with suppress(ProcessLookupError):  # it is over already
        ended, _, _ = select.select([os.pidfd_open(int(str(pid.readlink())))], [], [], 60)
        assert ended, "it goes on"


@thorough
def test_the_sanitizers_tests_are_there() -> None:
    """A renamed test, or one that no GPU runs any more, would be a row that failed on the GPU's only day."""
    tests = sorted(sanitizer.CASES.values())
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False)
    assert sorted(line for line in done.stdout.splitlines() if "::" in line) == tests, (
        done.stdout + done.stderr
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_tells_stages_shares_and_failures(tmp_path: Path) -> None:
    rows = Rows(tmp_path, commit="1" * 40)
    rows.append("attention", "a", [Row(kernel="k<b>", shape="decode", ms=1.5, gbps=2000.0, of_copy=0.62)])
    rows.append("nixl", "b", [Row(kernel="b", status="failed", note="it broke")])
    rows.write_tables({"device": "NVIDIA H200", "packages": {"torch": "2.11"}})
    plain = (tmp_path / "gpu-day.html").read_text()
    assert "62%" in plain
    assert "k&lt;b&gt;" in plain
    page = write_html(tmp_path, tmp_path / "page.html").read_text()
    assert all(text in page for text in ("NVIDIA H200", "1 failed", "it broke", "62%"))
    assert json.loads((tmp_path / "gpu-day.json").read_text())["rows"][0]["commit"] == "1" * 40
    (tmp_path / "gpu-day.json").write_text('{"rows": [{"status": "odd"}], "environment": {}}')
    with pytest.raises(UserError, match="is not what jobs/gpu_day.py writes"):
        write_html(tmp_path, tmp_path / "page.html")
