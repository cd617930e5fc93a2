"""What the machine did while runs were measured: probed, shown beside each other, and held against times."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.reports import Result, ResultWriter, collect_environment, load
from rayk.reports import environment as probes
from rayk.reports.compare import compare_markdown, sections
from rayk.reports.environment import copy_ceiling, machine_load
from rayk.reports.folder import changed_facts
from rayk.reports.trust import TOLERANCE, busy, probe_rows, unlike
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows

CALM = {"average_1_min": 0.5, "sha256_mb_per_s": 1000.0, "free_share": 0.99}
CEILING = {"what": "a copy", "gb_per_s": 10.0}


def environment(*, cores: int = 2, ceiling: Any = CEILING, **load: float) -> dict[str, Any]:
    return {"devices": {"num_cores": cores}, "ceiling": ceiling, "load": CALM | load}


def run(folder: Path, facts: dict[str, Any]) -> Result:
    draw = random.Random(0)
    writer = ResultWriter(folder, spec_yaml=SPEC, environment=facts)
    cell = cell_row(1, 2, ("BHLNC", "BHLNC"))
    writer.write_cell(cell, request_rows(cell, draw), transfer_rows(cell, draw))
    writer.finish()
    return load(folder)


class Ticking:
    """A clock that stands still but for the probed work: the n-th time it is done takes the n-th length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lengths_s: Sequence[float]) -> None:
        self.now_s, self.args, self._left = 0.0, list[Any](), iter(lengths_s)
        monkeypatch.setattr(probes, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, really done."""

        def done(*args: Any) -> Any:
            self.args.append(args)
            self.now_s += next(self._left)
            return work(*args)

        return done


def test_the_probes_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_s = [0.004, 0.003, 0.002, 0.005, 0.008, 0.004, 0.016, 0.004, 0.007]
    clock = Ticking(monkeypatch, lengths_s)
    sha256 = SimpleNamespace(sha256=clock.timed(hashlib.sha256))
    monkeypatch.setattr(probes, "hashlib", sha256)
    monkeypatch.setattr(os, "getloadavg", lambda: (7.125, 3.0, 2.0))
    # 2 MiB in the best time of 2 ms; of the nine, the median is 4 ms.
    assert machine_load() == {"average_1_min": 7.12, "sha256_mb_per_s": 1048.6, "free_share": 0.5}
    assert [len(data) for (data,) in clock.args] == [2**21] * 9
    monkeypatch.undo()
    found = collect_environment()["load"]
    assert found.keys() == {"average_1_min", "sha256_mb_per_s", "free_share"}
    assert 0 < found["free_share"] <= 1


def test_the_ceiling_is_the_faster_of_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking(monkeypatch, [0.02] * 8 + [0.01] + [0.03] * 4 + [0.008] + [0.03] * 4)
    for name in ("_copy", "_read_process"):
        monkeypatch.setattr(probes, name, clock.timed(getattr(probes, name)))
    found = copy_ceiling()
    rates = {name: rate for name, rate in found.items() if name.endswith("_gb_per_s") and name != "gb_per_s"}
    assert rates.pop("memcpy_gb_per_s") == 6.71  # 64 MiB in 10 ms
    assert found["gb_per_s"] == max(6.71, *rates.values())
    assert rates in ({}, {"process_vm_readv_gb_per_s": 8.39})  # in 8 ms; a sandbox may refuse the call
    assert "memcpy" in found["what"]
    assert ("process_vm_readv" in found["what"]) == bool(rates)
    assert all(source.nbytes == target.nbytes == 64 * 2**20 for source, target in clock.args)
    source, target = clock.args[-1]
    assert (target == source).all()
    assert "64 MiB" in found["what"]


def test_a_busy_machine_is_told() -> None:
    assert busy(environment()) == []
    assert busy({}) == []
    [crowded] = busy(environment(average_1_min=2.5))
    assert "2.5 tasks wanted the 2 cores" in crowded
    assert busy(environment(average_1_min=2.5, cores=4)) == []
    [shared] = busy(environment(free_share=0.6))
    assert "60% of what it can" in shared


@pytest.mark.parametrize(("rate", "is_told"), [(8.4, False), (8.2, True), (11.9, False), (12.1, True)])
def test_rates_that_differ_by_more_than_a_fifth_are_told(rate: float, is_told: bool) -> None:
    base, other = environment(), environment(ceiling=CEILING | {"gb_per_s": rate})
    assert pytest.approx(0.2) == TOLERANCE
    told = unlike(base, other)
    assert len(told) == is_told
    if is_told:
        assert f"{rate:g} instead of 10 ({10 * rate - 100:+.0f}%)" in told[0]
    assert unlike(environment(), environment(sha256_mb_per_s=700.0))[0].startswith("one core's SHA-256")


def test_ceilings_that_were_measured_otherwise_are_not_compared() -> None:
    other = environment(ceiling={"what": "another copy", "gb_per_s": 5.0})
    assert unlike(environment(), other) == []
    assert unlike(environment(), environment(ceiling="none")) == []
    assert unlike({}, environment()) == []


def test_a_comparison_shows_the_probes_and_says_what_is_doubtful(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", environment())
    same = run(tmp_path / "same", environment(sha256_mb_per_s=990.0))
    loud = run(tmp_path / "loud", environment(average_1_min=6.0, ceiling=CEILING | {"gb_per_s": 5.0}))
    assert probe_rows([calm.environment, loud.environment])[0] == [
        "one core's copy in host memory, GB/s",
        "10",
        "5",
    ]
    titles = [section.title for section in sections([calm, same])]
    assert "Reasons to distrust the times" not in titles
    first, *_, last = sections([calm, loud])
    assert first.title == "Reasons to distrust the times"
    pages = {name: (tmp_path / name / "report.html").read_text() for name in ("calm", "loud")}
    assert "The times are doubtful: when it began, 6 tasks wanted the 2 cores" in pages["loud"]
    assert "The times are doubtful" not in pages["calm"]
    assert [row[0] for row in first.rows] == ["loud", "loud"]
    assert last.title == "Environment"
    assert ["load average of the minute before", "0.5", "6"] in last.rows
    text = compare_markdown([loud, calm])
    assert "| loud | when it began, 6 tasks wanted the 2 cores" in text
    assert "| calm | one core's copy in host memory, GB/s: 10 instead of 5 (+100%) |" in text


def test_no_probe_keeps_a_run_from_being_resumed(tmp_path: Path) -> None:
    before, now = environment(), environment(average_1_min=9.0, ceiling=CEILING | {"gb_per_s": 1.0})
    assert changed_facts(before, now) == []
    run(tmp_path / "r", before)
    again = ResultWriter(tmp_path / "r", spec_yaml=SPEC, environment=now, resume=True)
    assert again.changed_facts == []
    assert len(again.finished) == 1
    again.write_environment(now)
    again.close()
    [session] = load(tmp_path / "r").environment["sessions"]
    assert session["load"] == CALM, "what the earlier cells were measured under stays"
    assert session["ceiling"] == CEILING
