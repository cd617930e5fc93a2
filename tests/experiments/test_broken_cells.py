"""What goes wrong beside the engines ends in a row or a message. No Ray cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments import run as run_module
from rayk.experiments.judge import CellJudge
from rayk.experiments.twins import Twins
from rayk.reports import ResultWriter, exit_code, load
from rayk.specs import Cell, expand, load_spec
from rayk.types.errors import DeviceError, UserError
from rayk.types.rows import RequestRow
from tests.specs.models import decoder, spec


@pytest.fixture
def cells() -> list[Cell]:
    matrix = {"decode.layout": ["BHLNC", "LBNHC"]}
    return expand(load_spec(spec(device="cpu", matrix=matrix)).spec, decoder())


class Engines:
    """Runs every cell: one request each. Stands for run._Runner."""

    def run(self, cell: Cell, prompts: Any, repeat: int, capture: bool) -> CellOutcome:
        row = RequestRow(
            cell_id=cell.cell_id,
            repeat=repeat,
            request_id=f"{cell.cell_id}/{repeat}/0",
            prompt_index=0,
            prompt_token_ids=[1],
        )
        return CellOutcome(requests=[row], wall_ns=5)


class Judge(CellJudge):
    """Breaks down over its first cell."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]
        self.twins = Twins()

    def prepare(self, cell: Cell, prompts: Any) -> None:
        raise self._errors[0]

    def needs_capture(self, cell: Cell) -> bool:
        return False

    def judge(self, cell: Cell, prompts: Any, outcomes: Any) -> Any:
        if self._errors:
            raise self._errors.pop()
        return run_module.CellRow(cell_id=cell.cell_id, axes=cell.axes, verdict="PASS")


def run_cells(cells: list[Cell], judge: CellJudge, folder: Path) -> ResultWriter:
    writer = ResultWriter(folder, spec_yaml="name: n\n", environment={})
    for cell in cells:
        engines: Any = Engines()
        run_module._run_cell(cell, [[1]], engines, judge, writer, run_module.Quiet())
    return writer


@pytest.mark.parametrize("expected", ["PASS", "ENGINE_ERROR"])
def test_checks_that_break_down_are_that_cells_row_and_the_next_one_runs(
    cells: list[Cell], tmp_path: Path, expected: str
) -> None:
    for cell in cells:
        object.__setattr__(cell, "expected_verdict", expected)
    run_cells(cells, Judge(AssertionError("3 rows of 4")), tmp_path)
    found = load(tmp_path).cells
    assert found["verdict"].tolist() == ["ENGINE_ERROR", "PASS"]
    assert "AssertionError: 3 rows of 4" in found["reason"][0]
    assert "test_broken_cells.py:" in found["reason"][0], "where"
    assert not found["met"][0], "whatever was expected, it was not this"
    assert exit_code(found) == 1
    assert load(tmp_path).requests["cell_id"].tolist() == [c.cell_id for c in cells]


def test_a_full_disk_is_no_verdict(cells: list[Cell], tmp_path: Path) -> None:
    error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        run_cells(cells, Judge(error), tmp_path)
    with pytest.raises(OSError, match="No space"):
        run_module._prepare_reference(Judge(error), cells[0], [[1]])


def test_a_question_that_breaks_down_waits_for_its_cell(cells: list[Cell]) -> None:
    run_module._prepare_reference(Judge(AssertionError("later")), cells[0], [[1]])
    with pytest.raises(UserError, match="now"):
        run_module._prepare_reference(Judge(UserError("now")), cells[0], [[1]])


@pytest.mark.parametrize(("model", "limit_s"), [(".", 180), ("nobody/has-this", 3780)])
def test_workers_that_never_come_are_a_message(
    monkeypatch: pytest.MonkeyPatch, model: str, limit_s: int
) -> None:
    """Those that may have to fetch a model have an hour more."""
    import ray

    def get(ref: object, *, timeout: float | None = None) -> object:
        assert timeout is not None, "this would wait for ever"
        raise ray.exceptions.GetTimeoutError(f"{timeout} s")

    monkeypatch.setattr(ray, "get", get)
    cells = [SimpleNamespace(prefill=SimpleNamespace(model=model, has_weights=True))]
    runner: Any = SimpleNamespace(_prepared="a reference", _cells=cells, _demands=())
    with pytest.raises(DeviceError, match=rf"no word of them within {limit_s} s(.|\n)*mend: .*rayk doctor"):
        run_module._Runner.ready(runner)
