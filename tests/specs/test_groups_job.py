"""The job on models with several attention groups: what its 40 cells cover, counted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.layout import LAYOUTS
from rayk.models.families import load_config
from rayk.specs import load_spec, plan_cells
from rayk.specs.cells import Cell
from tests.conftest import CheckpointFactory
from tests.spec_models import GROUP_MODELS

GROUPS = Path(__file__).parents[2] / "jobs" / "groups.yaml"
FOLDER = "checkpoints/groups/"
PAIRS = [(1, 2), (2, 1), (4, 2)]
SWITCHES = list(product((False, True), repeat=2))


@pytest.fixture(scope="module")
def cells(checkpoint: CheckpointFactory) -> list[Cell]:
    """As `rayk run` plans them."""
    models = {}
    for name, (family, values) in GROUP_MODELS.items():
        options = {"overrides": dict(values)} if values else {}
        models[FOLDER + name] = load_config(checkpoint(family, **options))
    return [cell for cell, _ in plan_cells(load_spec(GROUPS), models, device="cpu")]


def factors(cell: Cell) -> dict[str, Any]:
    """Its value of each factor; D's layout where there is a D."""
    found = {
        "model": str(cell.axes["model"]).removeprefix(FOLDER),
        "tp": cell.prefill.tp if cell.decode is None else (cell.prefill.tp, cell.decode.tp),
        "switches": (cell.prefill.fast_prefill, cell.prefill.hybrid_kv),
        "p": cell.prefill.layout,
    }
    if cell.decode is not None:
        assert found["switches"] == (cell.decode.fast_prefill, cell.decode.hybrid_kv)
        found["d"] = cell.decode.layout
    return found


def met(cells: list[Cell], *names: str) -> set[Any]:
    return {tuple(factors(cell)[name] for name in names) for cell in cells}


def test_at_most_40_cells_which_all_run_and_are_checked(cells: list[Cell]) -> None:
    assert len(cells) <= 40
    assert [c.unsupported for c in cells] == [None] * len(cells)
    assert all(c.checks == ("tokens", "kv_bytes", "kv_values") for c in cells)


def test_every_model_runs_with_every_switch(cells: list[Cell]) -> None:
    """All four combinations somewhere; handed over at least one of each switch's sides."""
    assert met(cells, "model", "switches") == set(product(GROUP_MODELS, SWITCHES))
    handed = [cell for cell in cells if cell.decode is not None]
    for switch in (0, 1):
        seen = {(model, switches[switch]) for model, switches in met(handed, "model", "switches")}
        assert seen == set(product(GROUP_MODELS, (False, True)))


def test_cells_that_hand_over_cover_all_pairs(cells: list[Cell]) -> None:
    """Of TP pairs, switches and the layouts of each side; each model at each TP pair, in unlike layouts."""
    handed = [cell for cell in cells if cell.decode is not None]
    values: dict[str, Any] = {"tp": PAIRS, "switches": SWITCHES, "p": list(LAYOUTS), "d": list(LAYOUTS)}
    for one, other in (("tp", "switches"), ("tp", "p"), ("tp", "d"), ("switches", "p"), ("switches", "d")):
        assert met(handed, one, other) == set(product(values[one], values[other])), (one, other)
    assert met(handed, "model", "tp") == set(product(GROUP_MODELS, PAIRS))
    assert len(met(handed, "p", "d")) == len(handed)
    assert len(met(handed, "model", "p")) == len(met(handed, "model", "d")) == len(handed)


def test_aggregated_cells_meet_every_tp_size_switch_and_layout(cells: list[Cell]) -> None:
    alone = [cell for cell in cells if cell.decode is None]
    assert met(alone, "tp", "switches") == set(product((1, 2, 4), SWITCHES))
    assert met(alone, "p") == {(name,) for name in LAYOUTS}
    assert met(alone, "model") == {(name,) for name in GROUP_MODELS}


def test_blocks_differ_between_the_sides_and_from_chunks(cells: list[Cell]) -> None:
    sizes = {
        (factors(c)["model"], c.prefill.block_size, c.decode.block_size)
        for c in cells
        if c.decode is not None and c.prefill.block_size != c.decode.block_size
    }
    assert {"gemma3n", "gemma3n-other-streams", "llama4", "llama4-all-routed"} <= {
        model for model, *_ in sizes
    }
    assert any(p > d for _, p, d in sizes)
    assert any(p < d for _, p, d in sizes)
    # 64 and 40 are the chunks.
    assert any(model == "llama4" and 64 % p for model, p, _ in sizes)
    assert any(model == "llama4-all-routed" and 40 % p and 40 % d for model, p, d in sizes)
