"""The grid covers the sizes that were asked for, without holes, and its cells can run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayk.costs import CostBook, StepFeatures, engine_key
from rayk.costs.steps import hull_around
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.planner.hardware import roofline_book
from rayk.planner.measure import MAX_PAIR_RATE, USUAL, GridRequest, every_pair, grid_spec, lengths, pair_rate
from rayk.planner.wanted import Wanted, wanted_by
from rayk.simulate.arrivals import cell_arrivals
from rayk.simulate.run import simulate_cell
from rayk.specs import Cell, expand, load_spec, resolve_prompts
from rayk.specs.checks import check_cell
from rayk.types.errors import UserError
from tests.conftest import CheckpointFactory
from tests.markers import thorough
from tests.specs.models import spec


@pytest.fixture
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llama")


def cells_of(asked: GridRequest, config: DecoderConfig) -> list[Cell]:
    loaded = load_spec(grid_spec(asked, config))
    cells = expand(loaded.spec, config)
    for cell in cells:
        check_cell(cell, config, loaded)
    return cells


def test_lengths_grow_by_four_up_to_the_longest() -> None:
    assert lengths(1024) == [16, 64, 256, 1024]
    assert lengths(1000) == [16, 64, 256, 1000]
    assert lengths(16) == [16]


def test_every_size_of_batch_meets_every_length(model: Path) -> None:
    asked = GridRequest(model=str(model), tp=(1, 2), pairs=((1, 2),), max_tokens=256, max_seqs=16)
    cells = cells_of(asked, read_config(model))
    alone = [c for c in cells if c.mode == "aggregated" and c.num_prefill_engines == 1]
    prompts = {c.cell_id: c.spec.prompts.random for c in alone}
    met = {
        (c.prefill.max_seqs, tuple(found.input_tokens), c.prefill.max_batch_tokens, c.prefill.tp)
        for c in alone
        if (found := prompts[c.cell_id]) is not None
    }
    mixed = (16, 64, 256)
    for num in (1, 4, 16):
        for sizes in ((16,), (64,), (256,), *([mixed] if num > 1 else [])):
            assert {(num, sizes, chunk, tp) for chunk in (64, 512) for tp in (1, 2)} <= met
    pairs = [c for c in cells if c.decode is not None]
    assert [(c.prefill.tp, c.decode.tp) for c in pairs] == [(1, 2)] * 3
    assert [c.sampling.max_tokens for c in pairs] == [4, 4, 24], "the last one is busy"
    assert [c.num_prefill_engines for c in cells if c.num_prefill_engines > 1] == [2, 2, 2]
    assert all(c.prefill.record_steps for c in cells)


def test_a_quick_grid_has_the_ends_of_batches_only(model: Path) -> None:
    asked = GridRequest(model=str(model), max_tokens=256, is_quick=True, has_neighbours=False)
    cells = cells_of(asked, read_config(model))
    assert {c.prefill.max_seqs for c in cells} == {1, 16}
    assert {c.prefill.max_batch_tokens for c in cells} == {512}


def test_what_the_model_cannot_do_is_refused(model: Path) -> None:
    config = read_config(model)
    with pytest.raises(UserError, match="TP 3"):
        grid_spec(GridRequest(model=str(model), pairs=((1, 3),)), config)
    longest = max(
        n
        for c in cells_of(GridRequest(model=str(model), max_tokens=10**6, is_quick=True), config)
        for n in (c.spec.prompts.random.input_tokens if c.spec.prompts.random else ())
    )
    assert longest == config.max_positions - 24


def test_every_pair() -> None:
    assert every_pair((1, 2)) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_pairs_have_time_to_themselves(model: Path) -> None:
    """A longer prompt comes later, that of a larger model later still, and none faster than is of use."""
    small = read_config(model)
    large = replace(small, num_layers=16 * small.num_layers, layers=small.layers * 16)
    rates = [
        [pair_rate(GridRequest(model=""), config, num) for num in (32, 4096)] for config in (small, large)
    ]
    assert rates[0][0] == MAX_PAIR_RATE
    assert rates[0][1] > rates[1][1] > 0


def test_a_grid_for_an_experiment_holds_its_cells(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    asked = {
        "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300]}},
        "sampling": {"max_tokens": 40},
        "engine": {"max_seqs": 5, "max_batch_tokens": 96},
        "device": "cpu",
    }
    matrix = [{"mode": "aggregated", "prefill.tp": 2}, {"prefill.tp": 1, "decode.tp": 2}]
    path.write_text(yaml.safe_dump(spec(model=str(model), matrix=matrix, **asked)))
    found = wanted_by(path, str(model), refuse)
    expected = Wanted(
        tp=(1, 2),
        pairs=((1, 2),),
        device="cpu",
        dtype="float32",
        block_size=16,
        max_tokens=340,
        max_seqs=5,
        max_batch_tokens=96,
    )
    assert found == expected
    cells = cells_of(GridRequest(model=str(model), **asdict(found)), read_config(model))
    assert max(n for c in cells for n in (c.spec.prompts.random.input_tokens)) == 340


def test_an_experiment_of_other_models_or_of_unlike_engines_wants_no_grid(
    model: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    path = tmp_path / "e.yaml"
    other = checkpoint("qwen3")
    path.write_text(yaml.safe_dump(spec(model=str(other))))
    with pytest.raises(UserError, match="no engine of a model with the sizes of"):
        wanted_by(path, str(model), refuse)
    path.write_text(yaml.safe_dump(spec(model=str(model), matrix={"decode.block_size": [8, 16]})))
    with pytest.raises(UserError, match="several block_size: 16, 8"):
        wanted_by(path, str(model), refuse)


def test_settings_that_no_grid_has_are_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(spec(model=str(model), matrix={"decode.layout": ["LHBNC"]})))
    with pytest.raises(UserError, match="leaves layout at auto"):
        wanted_by(path, str(model), refuse)


def test_a_grid_for_a_plan_has_all_that_it_may_try(
    model: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    plan = {
        "model": str(model),
        "dtype": "float32",
        "cpu": {"slots": 4},
        "costs": str(tmp_path / "not there yet"),
        "traffic": {"input_tokens": "100-200", "output_tokens": "50"},
        "slo": {"ttft": "1s"},
        "search": {"decode_tp": [1, 2], "max_seqs": [6], "block_size": [8]},
    }
    path.write_text(yaml.safe_dump(plan))
    expected = Wanted(
        tp=(1, 2, 4),
        pairs=((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)),
        device="cpu",
        dtype="float32",
        block_size=8,
        max_tokens=250,
        max_seqs=6,
        max_batch_tokens=1024,
    )
    assert wanted_by(path, str(model), refuse) == expected
    other = checkpoint("qwen3")
    with pytest.raises(UserError, match="no engine of a model with the sizes of"):
        wanted_by(path, str(other), refuse)


def refuse(model: str) -> Any:
    raise AssertionError("no prompt is a text")


@thorough
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_traffic_of_the_measured_sizes_lies_within_the_hull(model: Path, factor: float) -> None:
    """A grid is simulated on a machine so many times as slow as the usual one; then loads from one request at
    a time up to more than the engine can do."""
    config = read_config(model)
    asked = GridRequest(
        model=str(model), max_tokens=336, max_seqs=8, max_batch_tokens=256, has_neighbours=False
    )
    book = roofline_book(USUAL["cpu"], config, tp=(1,), dtype="float32", block_size=16)
    (usual,) = book.engines.values()

    def steps_of(cell: Cell) -> list[StepFeatures]:
        key = engine_key(config, cell.prefill)
        costs = CostBook(engines={key: replace(usual, key=key).scaled(factor)})
        prompts = resolve_prompts(cell.spec, config)
        rows = simulate_cell(cell, config, cell_arrivals(cell, prompts), costs).steps
        return [StepFeatures(**{name: getattr(row, name) for name in StepFeatures.__slots__}) for row in rows]

    measured = [step for cell in cells_of(asked, config) for step in steps_of(cell)]
    hulls = [hull_around([step for step in measured if step.is_decode == kind]) for kind in (False, True)]
    for lengths_, num_output in (([192, 320, 256], 8), ([96, 160, 128], 40), ([24, 48, 32], 96)):
        loads = {
            "prompts": {"random": {"count": 60, "input_tokens": lengths_}},
            "sampling": {"max_tokens": num_output, "ignore_eos": True},
            "engine": {"max_seqs": 8, "max_batch_tokens": 256, "num_blocks": 300},
            "matrix": [{"mode": "aggregated", "arrival.rate": rate} for rate in (1.0, 4.0, 16.0, 64.0)],
        }
        for cell in expand(load_spec(spec(model=str(model), **loads)).spec, config):
            outside = [hulls[step.is_decode].why_outside(step) for step in steps_of(cell)]
            assert not any(outside), (cell.cell_id, [why for why in outside if why])
