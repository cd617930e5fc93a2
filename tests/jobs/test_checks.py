"""A `--check` that fails says which rows missed which limit, on stderr."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.benchmarks import harness
from jobs.benchmarks.harness import ending
from rayk.reports.environment import git_commit
from rayk.reports.page import Column
from rayk.types.errors import UserError

JOBS = Path(__file__).parents[2] / "jobs"
MADE = str(JOBS / "benchmarks" / "made.py")
ITS_OWN = "attention_gpu.py"
"""Its exit status is its own: machines without an install run it."""


def test_missed_limits_are_told_and_fail_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert [ending([], check=check) for check in (False, True)] == [0, 0]
    assert capsys.readouterr().err == ""
    assert [ending(["a: 3 ms, the limit is 2 ms"], check=check) for check in (False, True)] == [0, 1]
    assert capsys.readouterr().err == "a: 3 ms, the limit is 2 ms\n" * 2


def test_every_check_ends_here() -> None:
    """Every benchmark runs in the harness; nobody else has a --check that does not end as theirs."""
    scripts = [p for p in JOBS.glob("benchmarks/*.py") if "if __name__ ==" in p.read_text()]
    assert len(scripts) >= 20
    wanted = dict.fromkeys(scripts, "run")
    wanted |= {p: "ending" for p in JOBS.glob("*.py") if '"--check"' in p.read_text()}
    for path, name in wanted.items():
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls}
        assert name in names or path.name == ITS_OWN, path.name


def test_what_is_wrong_fails_without_a_check_and_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def fill(options: argparse.Namespace, page: harness.Page) -> None:
        page.wrong.append("other tokens")

    assert harness.run(fill, MADE, title="Made", argv=["--record"]) == 1
    assert capsys.readouterr().err == "other tokens\n"
    assert list(tmp_path.iterdir()) == []


def test_tables_and_figures_go_to_a_folder_that_has_none(tmp_path: Path) -> None:
    columns = (Column("case", "case"), Column("ms", "ms", ".1f"))
    rows = [{"case": "a", "ms": 1.25, "every": [1, 2]}]

    def fill(options: argparse.Namespace, page: harness.Page) -> None:
        page.environment["threads"] = 1
        figure = harness.lines("speed", "Speed", {"a": ([1, 2], [3.0, 4.0])})
        page.section("Cases", columns, rows, note="Medians.", plots=[figure])
        page.tables = {"cases": rows}

    out = tmp_path / "out"
    assert harness.run(fill, MADE, title="Made", argv=["--out", str(out)]) == 0
    assert "| a | 1.2 |" in (out / "made.md").read_text()
    assert "one thread per process" in (out / "made.md").read_text()
    assert (out / "cases.csv").read_text() == 'case,ms,every\na,1.25,"[1, 2]"\n'
    assert json.loads((out / "environment.json").read_text())["threads"] == 1
    page = (out / "report.html").read_text()
    assert all(text in page for text in ("Made", "Medians.", '"id": "speed"', "<h2>Reproduce</h2>"))
    commit = git_commit()
    assert commit is None or f"git checkout {commit.removesuffix('+changes')}" in page
    assert "python jobs/benchmarks/made.py" in page
    with pytest.raises(UserError, match="already holds a run's tables"):
        harness.run(fill, MADE, title="Made", argv=["--out", str(out)])


def test_a_page_is_printed_and_recorded_with_what_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["/x/made.py", "--rounds", "3", "--record"])
    asked: list[tuple[int, str, list[int]]] = []

    def fill(options: argparse.Namespace, page: harness.Page) -> list[str]:
        asked.append((options.rounds, options.name, options.cases))
        page.table(("case", "ms"), [("a", 1.5), ("b", 2)])
        return ["b: 2 ms, the limit is 1 ms"]

    cases = {"type": int, "nargs": "*", "default": [7]}
    assert harness.run(fill, MADE, title="Made", rounds=5, name="x", cases=cases) == 0
    assert asked == [(3, "x", [7])]
    told = capsys.readouterr()
    assert told.err == "b: 2 ms, the limit is 1 ms\n"
    lines = told.out.splitlines()
    assert (tmp_path / "made.md").read_text().splitlines() == lines
    assert lines[:2] == ["# Made", ""]
    assert lines[2:6] == ["| case | ms |", "| --- | ---: |", "| a | 1.5 |", "| b | 2 |"]
    assert any("when it began" in line for line in lines[6:])
    assert "Reproduce:" in lines
    assert lines[-1] == "    python jobs/benchmarks/made.py --rounds 3 --record"
    monkeypatch.setattr(sys, "argv", ["made.py", "--check"])
    assert harness.run(fill, MADE, title="Made", rounds=5, name="x", cases=cases) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_what_goes_to_a_folder_has_every_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["made.py", "--out", str(tmp_path / "out")])
    measured = [("a, b", 1.25), ("c", 2.0)]
    assert harness.run(lambda _, page: page.data(("case", "ms"), measured), MADE, title="Made") == 0
    assert (tmp_path / "out" / "made.csv").read_text().splitlines() == ["case,ms", '"a, b",1.25', "c,2.0"]
    lines = (tmp_path / "out" / "made.md").read_text().splitlines()
    assert lines[-1] == "    python jobs/benchmarks/made.py", "where results go changes nothing of them"


def test_calls_take_turns_at_being_first_and_the_first_round_does_not_count() -> None:
    now, order = [0], []

    def call(name: str, took_ms: int) -> Callable[[], None]:
        def step() -> None:
            order.append(name)
            now[0] += took_ms * 10**6

        return step

    found = harness.in_turns([call("a", 1), call("b", 3)], 2, clock_ns=lambda: now[0])
    assert found == [[1.0, 1.0], [3.0, 3.0]]
    assert order == ["a", "b", "b", "a", "a", "b"]
    calls: list[None] = []
    harness.in_turns([lambda: calls.append(None)], 100, limit_s=-1.0)
    assert len(calls) == 4, "three rounds and the first, whatever the limit"
    assert harness.medians([(1, 5), (2, 7), (9, 6)]) == [2, 6]


ROW = {
    "mode": "pull",
    "tp": "2->1",
    "layouts": "BHLNC->LBHNC",
    "block_sizes": "16->16",
    "tables": "shuffled",
    "staging": "never",
    "staged": 0,
}


def job(name: str) -> Any:
    return importlib.import_module(f"jobs.benchmarks.{name}")


def test_a_slow_transfer_is_named() -> None:
    ceiling = job("transfer_ceiling")
    rows = [ROW | {"of_raw": share} for share in (0.95, 0.949, None)]
    told = ceiling.missed([*rows, ROW | {"of_raw": 0.1, "staged": 1}], [])
    where = "TP 2->1, layouts BHLNC->LBHNC, blocks 16->16, shuffled, staging never"
    assert told == [f"{where}: 94.9 % of bare NIXL, the limit is 95 %"]


@pytest.mark.parametrize(
    ("low", "high", "rounds"),
    [(0.94, 0.97, [15, 120]), (None, None, [15, 120]), (0.95, 0.99, [15]), (0.90, 0.949, [15])],
)
def test_a_transfer_that_may_be_on_either_side_of_the_limit_is_measured_longer(
    low: float | None, high: float | None, rounds: list[int]
) -> None:
    ceiling = job("transfer_ceiling")
    (cell, *_) = [c for c in ceiling.load_sweep(ceiling.SPEC).ceiling if c.mode == "pull"]
    asked: list[int] = []

    class Hosts:
        def measure(self, cell: Any, rounds: int) -> dict[str, Any]:
            asked.append(rounds)
            of_raw = {"of_raw": len(asked) / 10, "of_raw_low": low, "of_raw_high": high, "of_raw_wall": 1.0}
            stages = dict.fromkeys((*ceiling.STAGES, "bare_nixl", "bare_rest"), 1.0)
            cpu = dict.fromkeys(("bare", "read", "all", "copy"), 1.0)
            sizes = dict.fromkeys(("run_bytes", "num_bytes", "num_descriptors", "num_merged"), 1)
            times = dict.fromkeys(("wall_s", "memcpy_s", "post_s", "raw_s", "offer_cpu_s"), 1.0)
            return of_raw | sizes | times | {"stages": stages, "cpu": cpu, "staged": 0, "loopback_bytes": 0}

    row = ceiling.measure_cell(cell, Hosts(), 15)
    assert asked == rounds
    assert (row["rounds"], row["of_raw"]) == (rounds[-1], len(rounds) / 10)


def test_a_transfer_that_takes_more_cpu_time_than_its_targets_is_named() -> None:
    ceiling = job("transfer_ceiling")
    seconds = {"bare": 0.010, "read": 0.0111, "all": 0.018, "copy": 0.009, "offer": 0.0091}
    row = ceiling.cpu_row(seconds, 10**8)
    assert {name: round(value, 9) for name, value in row.items()} == {
        "bare_cpu": 100.0,
        "read_cpu": 111.0,
        "proven_cpu": 180.0,
        "copy_cpu": 90.0,
        "offer_cpu": 91.0,
        "read_of_bare": 1.11,
        "proven_of_both": 0.947368421,
        "offer_of_copy": 1.011111111,
    }
    told = ceiling.missed([], [ROW | row])
    assert [line.partition("CPU time ")[2] for line in told] == [
        "1.11 of bare NIXL (read_of_bare), the limit is 1.1",
        "1.01 of a copy (offer_of_copy), the limit is 1",
    ]


def test_stages_are_watched_for_a_while_only() -> None:
    rounds, reads = job("pull_rounds"), job("raw_reads")
    before = [getattr(owner, name) for _, owner, name in rounds.WATCHED]
    with rounds.watching(reads.Clock()) as seen:
        now = [getattr(owner, name) for _, owner, name in rounds.WATCHED]
    assert not set(before) & set(now)
    assert [getattr(owner, name) for _, owner, name in rounds.WATCHED] == before
    assert sum(seen["plan"]) == 0


def test_a_slow_step_is_named() -> None:
    control = job("control_plane")
    cases = [control.Case(tp=tp, comm=comm, batch=8) for tp, comm in ((1, "shm"), (2, "shm"), (2, "gloo"))]
    results = dict(zip(cases, ({"total": 1000.0}, {"total": 2999.9}, {"total": 9e9}), strict=True))
    assert control.missed(results) == [f"{cases[0].name}: 1000 us per step, the target is under 1000 us"]


def test_slow_and_growing_decisions_are_named() -> None:
    decisions = job("decision_cost")
    first = decisions.Case("load_aware", 4, decisions.RUNNING[0])
    cases = [decisions.Case("load_aware", 4, num) for num in decisions.RUNNING]
    costs = {case: decisions.Cost(150.0, 160.0) for case in cases}
    assert decisions.missed(costs) == []
    costs[cases[-1]] = decisions.Cost(150.0 * decisions.MAX_GROWTH, 160.0)
    row = f"load_aware, 4 engines, prompt {first.num_prompt_tokens:,}"
    assert decisions.missed(costs)[-1] == f"{row}: growth {decisions.MAX_GROWTH:.2f}, the limit is " + (
        f"{decisions.MAX_GROWTH:g}"
    )


def test_what_a_server_adds_too_much_is_named() -> None:
    server = job("serve_overhead")
    results = {"uvicorn": {"request": 10.0, "token": 0.9}, "serve": {"request": 99.0, "token": 99.0}}
    assert server.missed(results) == ["uvicorn, request: 10.00 ms, the target is under 10 ms"]
    assert server.missed({"serve": results["serve"]}) == []


@pytest.mark.parametrize("check", [False, True])
def test_the_block_pools_check_ends_with_its_rows(
    check: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole script: the pool of a made-up machine takes three times as long when it is larger."""
    pool = job("block_pool")
    monkeypatch.setattr(pool, "measure", lambda *_: (1.0, 3.0))
    monkeypatch.setattr(sys, "argv", ["block_pool.py", *(["--check"] if check else [])])
    assert pool.main() == int(check)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in told] == ["growth 3.00, the limit is 2"] * len(pool.STATES)
