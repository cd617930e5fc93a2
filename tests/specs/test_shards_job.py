"""The job on dealt tokens and stages: what its cells cover, counted."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.kv.layout import LAYOUTS
from rayk.models.families import load_config
from rayk.parallel.shard import EngineShape
from rayk.specs import load_spec, plan_cells
from rayk.specs.cells import Cell
from tests.conftest import CheckpointFactory
from tests.spec_models import JOBS, spec_models

pytestmark = pytest.mark.thorough
MODELS = spec_models("shards.yaml")
FOLDER = "checkpoints/shards/"


@pytest.fixture(scope="module")
def cells(checkpoint: CheckpointFactory) -> list[Cell]:
    """As `rayk run` plans them, which also refuses what engines cannot compute."""
    models = {}
    for name, (family, values) in MODELS.items():
        options = {"overrides": dict(values)} if values else {}
        models[FOLDER + name] = load_config(checkpoint(family, **options))
    return [cell for cell, _ in plan_cells(load_spec(JOBS / "shards.yaml"), models, device="cpu")]


def shape(engine: Any) -> EngineShape:
    """However many layers a stage has."""
    stages = (1,) * engine.pp if engine.pp > 1 else ()
    return EngineShape(engine.tp, engine.dcp, engine.dcp_interleave if engine.dcp > 1 else 1, stages)


def pairs_of(cells: list[Cell]) -> list[tuple[EngineShape, EngineShape]]:
    return [(shape(c.prefill), shape(c.decode)) for c in cells if c.decode is not None]


def test_all_run_and_are_small(cells: list[Cell]) -> None:
    assert [cell.unsupported for cell in cells] == [None] * len(cells) == [None] * 31
    assert {cell.checks for cell in cells} == {("tokens", "kv_bytes", "kv_values")}
    assert max(cell.num_workers for cell in cells) <= 6
    assert all(any(max(engine.dcp, engine.pp) > 1 for engine in cell.engines) for cell in cells)
    # Reports keep apart what the ids tell apart.
    assert len({cell.cell_id for cell in cells}) == len(cells)


@pytest.mark.parametrize("size", ["dcp", "pp"])
def test_every_model_is_divided_on_either_side(cells: list[Cell], size: str) -> None:
    handed = [cell for cell in cells if cell.decode is not None]
    divided = {
        (str(cell.axes["model"]).removeprefix(FOLDER), side)
        for cell in handed
        for side, engine in (("prefill", cell.prefill), ("decode", cell.decode))
        if engine is not None and getattr(engine, size) > 1
    }
    assert divided == {(model, side) for model in MODELS for side in ("prefill", "decode")}


def test_pairs_of_sizes_and_turns(cells: list[Cell]) -> None:
    pairs = pairs_of(cells)
    sizes = {(p.dcp, d.dcp) for p, d in pairs}
    assert sizes >= {(1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (3, 1), (2, 4)}
    turns = {engine.dcp_interleave for pair in pairs for engine in pair if engine.dcp > 1}
    assert {1, 2, 4, 8, 16} <= turns, "from one token to a whole block"
    assert any(p == d and p.dcp > 1 for p, d in pairs), "alike on both sides"
    assert {c.axes["transfer.mode"] for c in cells} - {None} == {"pull", "push"}
    for side in ("prefill", "decode"):
        assert {c.axes[f"{side}.layout"] for c in cells} - {None} == set(LAYOUTS), side


def test_pairs_of_stages(cells: list[Cell]) -> None:
    staged = [c for c in cells if any(engine.pp > 1 for engine in c.engines)]
    pairs = pairs_of(staged)
    sizes = {(p.pp, d.pp) for p, d in pairs}
    assert sizes >= {(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (1, 3)}
    assert {c.axes["transfer.mode"] for c in staged} - {None} == {"pull", "push"}
    both = {(side, kind) for pair in pairs for side, s in zip("pd", pair, strict=True) for kind in kinds(s)}
    assert both >= {(side, kind) for side in "pd" for kind in ("pp", "tp x pp", "dcp x pp", "tp", "dcp")}
    chosen = {side for c in staged for side in ("prefill", "decode") if c.axes.get(f"{side}.pp_layers")}
    assert chosen == {"prefill", "decode"}
    for side in ("prefill", "decode"):
        assert {c.axes[f"{side}.layout"] for c in staged} - {None} == set(LAYOUTS), side


def kinds(shape: EngineShape) -> set[str]:
    """Name what a side of a pair divides."""
    own = "dcp" if shape.dcp > 1 else "tp" if shape.tp > 1 else ""
    if shape.pp == 1:
        return {own}
    return {f"{own} x pp"} if own else {"pp"}
