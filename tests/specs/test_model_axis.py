"""Several models in one matrix, and the job on hybrid models, which is one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.layout import LAYOUTS
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.hybrids import FAMILIES
from rayk.specs import expand, load_spec, plan_cells
from rayk.specs.cells import Cell
from rayk.types.config import EngineConfig
from rayk.types.errors import LayoutVetoed, SpecError
from tests.conftest import CheckpointFactory
from tests.spec_models import ONE_GROUP
from tests.specs.models import decoder, spec

HYBRID = Path(__file__).parents[2] / "jobs" / "hybrid.yaml"
FOLDER = "checkpoints/hybrid/"


def two(**changes: Any) -> dict[str, Any]:
    return spec(model="a/one", matrix={"model": ["a/one", "b/two"], "prefill.tp": [1, 4]}, **changes)


def test_cells_are_named_and_planned_by_their_model() -> None:
    """The second has 6 query heads, which 4 ranks cannot share, and half the positions."""
    models = {"a/one": decoder(), "b/two": replace(decoder(), num_query_heads=6)}
    found = expand(load_spec(two()).spec, models, device="cpu")
    assert [(c.axes["model"], c.prefill.tp, c.unsupported is None) for c in found] == [
        ("a/one", 1, True),
        ("a/one", 4, True),
        ("b/two", 1, True),
        ("b/two", 4, False),
    ]
    assert [c.cell_id for c in found] == ["one-p1-d1", "one-p4-d1", "two-p1-d1", "two-p4-d1"]
    assert [c.prefill.model for c in found] == [c.axes["model"] for c in found]


def test_every_model_is_checked_with_its_own_limits() -> None:
    models = {"a/one": decoder(), "b/two": replace(decoder(), max_positions=64)}
    loaded = load_spec(two(prompts={"random": {"count": 1, "input_tokens": 50}}))
    with pytest.raises(SpecError, match="the model's 64 positions"):
        plan_cells(loaded, models, device="cpu")
    planned = plan_cells(loaded, dict.fromkeys(models, decoder()), device="cpu")
    assert len(planned) == 4


def test_prompts_are_drawn_from_each_models_vocabulary() -> None:
    models = {"a/one": decoder(), "b/two": replace(decoder(), vocab_size=10)}
    loaded = load_spec(two(prompts={"random": {"count": 1, "input_tokens": 50}}))
    prompts = {c.axes["model"]: p for c, p in plan_cells(loaded, models, device="cpu")}
    assert max(prompts["a/one"][0]) >= 10 > max(prompts["b/two"][0])


def test_folders_of_one_name_are_refused() -> None:
    changed = spec(model="a/one", matrix={"model": ["a/one", "b/one"]})
    with pytest.raises(SpecError, match="'a/one' and 'b/one' share the folder name"):
        expand(load_spec(changed).spec, decoder(), device="cpu")


def test_models_are_those_that_cells_run() -> None:
    assert load_spec(spec(model="m")).spec.models() == ["m"]
    assert load_spec(spec(model="m", matrix={"model": ["a", "b"]})).spec.models() == ["a", "b"]
    mixed = spec(model="m", matrix=[{"prefill.tp": [1]}, {"model": ["a", "m"]}])
    assert load_spec(mixed).spec.models() == ["m", "a"]


@pytest.fixture(scope="module")
def models(checkpoint: CheckpointFactory) -> dict[str, DecoderConfig]:
    """What a run of jobs/hybrid.yaml writes."""
    found = {FOLDER + family: load_config(checkpoint(family)) for family in FAMILIES}
    for family, values in ONE_GROUP.items():
        path = checkpoint(family, overrides=dict(values))
        found[f"{FOLDER}{family}-one-group"] = load_config(path)
    return found


@pytest.fixture(scope="module")
def hybrid_cells(models: dict[str, DecoderConfig]) -> list[Cell]:
    """As `rayk run` plans them, so that each setting is also refused where the model has no use for it."""
    return [cell for cell, _ in plan_cells(load_spec(HYBRID), models, device="cpu")]


UNEQUAL = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)]
FAMILY_PAIRS = UNEQUAL[:4]
"""What each family is handed over between."""


def holders(models: dict[str, DecoderConfig]) -> dict[str, set[str]]:
    """Layout -> the models whose groups it can hold, whatever the TP size."""
    found: dict[str, set[str]] = {name: set() for name in LAYOUTS}
    for path, config in models.items():
        for name in LAYOUTS:
            try:
                plan_engine(EngineConfig(model=path, layout=name), config)
            except LayoutVetoed:
                continue
            found[name].add(path.removeprefix(FOLDER))
    return found


def name_of(cell: Cell) -> str:
    return str(cell.axes["model"]).removeprefix(FOLDER)


def test_the_hybrid_job_has_at_most_eight_cells_per_model_which_all_run(
    hybrid_cells: list[Cell], models: dict[str, DecoderConfig]
) -> None:
    assert len(hybrid_cells) <= 8 * len(models)
    assert [c.unsupported for c in hybrid_cells] == [None] * len(hybrid_cells)
    assert all(c.checks == ("tokens", "kv_bytes", "kv_values") for c in hybrid_cells)
    assert {name_of(c) for c in hybrid_cells} >= set(FAMILIES)


def test_the_hybrid_job_covers_all_pairs(hybrid_cells: list[Cell], models: dict[str, DecoderConfig]) -> None:
    """Of family, TP pair, P layout and D layout, wherever a layout can hold a family."""
    can = holders(models)
    assert can["LHBNC"] == {"mamba2", "mamba2-one-group", "deepseek_v3"}
    assert all(can[name] == {m.removeprefix(FOLDER) for m in models} for name in LAYOUTS if name != "LHBNC")
    wanted: dict[tuple[str, str], set[Any]] = {
        ("family", "tp"): set(product(FAMILIES, FAMILY_PAIRS)),
        ("family", "p"): {(f, name) for name in LAYOUTS for f in can[name] & set(FAMILIES)},
        ("family", "d"): {(f, name) for name in LAYOUTS for f in can[name] & set(FAMILIES)},
        ("tp", "p"): set(product(UNEQUAL, LAYOUTS)),
        ("tp", "d"): set(product(UNEQUAL, LAYOUTS)),
        ("p", "d"): set(product(LAYOUTS, LAYOUTS)),
    }
    handed = [
        {
            "family": name_of(c),
            "tp": (c.prefill.tp, c.decode.tp),
            "p": c.prefill.layout,
            "d": c.decode.layout,
        }
        for c in hybrid_cells
        if c.decode is not None
    ]
    missing = {
        (a, b): sorted(pairs - {(cell[a], cell[b]) for cell in handed}) for (a, b), pairs in wanted.items()
    }
    assert missing == {factors: [] for factors in wanted}


def test_the_hybrid_job_runs_every_family_and_layout_aggregated(hybrid_cells: list[Cell]) -> None:
    aggregated = [c for c in hybrid_cells if c.decode is None]
    assert {(name_of(c), c.prefill.tp) for c in aggregated} >= set(product(FAMILIES, (1, 2, 4)))
    assert {(c.prefill.tp, c.prefill.layout) for c in aggregated} == set(product((1, 2, 4), LAYOUTS))


def test_the_hybrid_job_hands_a_single_group_over_at_every_tp_pair(hybrid_cells: list[Cell]) -> None:
    own = [c for c in hybrid_cells if name_of(c).endswith("-one-group")]
    pairs = {(c.prefill.tp, c.decode.tp) for c in own if c.decode is not None}
    assert pairs == set(product((1, 2, 4), (1, 2, 4)))
    assert {name_of(c) for c in own} == {f"{family}-one-group" for family in ONE_GROUP}
    assert any(c.decode is None for c in own)


def test_the_hybrid_job_varies_blocks_and_backends(hybrid_cells: list[Cell]) -> None:
    """Each on both sides, and with at least two families."""
    settings = ("block_size", "state_block_size", "kernel_block_sizes", "layer_backends")
    met: dict[tuple[str, str], set[str]] = {(side, s): set() for side in ("P", "D") for s in settings}
    usual = EngineConfig(model="m")
    for cell in hybrid_cells:
        if cell.decode is None:
            continue
        for side, engine in (("P", cell.prefill), ("D", cell.decode)):
            for name in settings:
                if getattr(engine, name) != getattr(usual, name):
                    met[side, name].add(name_of(cell))
    assert {key: models for key, models in met.items() if len(models) < 2} == {}
