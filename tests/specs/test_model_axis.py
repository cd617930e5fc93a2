"""Several models in one matrix, and the job on hybrid models, which is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.kv.layout import LAYOUTS
from rayk.models.config import DecoderConfig
from rayk.models.families import load_config
from rayk.oracle.hybrids import FAMILIES, ONE_GROUP
from rayk.specs import expand, load_spec, plan_cells
from rayk.types.errors import SpecError
from tests.conftest import CheckpointFactory
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
    """What jobs/hybrid.py writes."""
    found = {FOLDER + family: load_config(checkpoint(family)) for family in FAMILIES}
    for family, values in ONE_GROUP.items():
        path = checkpoint(family, overrides=dict(values))
        found[f"{FOLDER}{family}-one-group"] = load_config(path)
    return found


def test_the_hybrid_job_covers_families_tp_settings_and_layouts(models: dict[str, DecoderConfig]) -> None:
    loaded = load_spec(HYBRID)
    found = expand(loaded.spec, models, device="cpu")
    assert len(found) <= 80
    assert [c.unsupported for c in found] == [None] * len(found)
    assert all(c.checks == ("tokens", "kv_bytes", "kv_values") for c in found)
    for family in FAMILIES:
        own = [c for c in found if c.spec.model == FOLDER + family]
        pairs = {(c.prefill.tp, c.decode.tp) for c in own if c.decode is not None}
        assert pairs == {(1, 2), (2, 1), (4, 2), (2, 4)}
        assert {c.prefill.tp for c in own if c.decode is None} == {1, 2, 4}
        # LHBNC holds groups of one shape only.
        layouts = set(LAYOUTS) - (set() if family in ("mamba2", "deepseek_v3") else {"LHBNC"})
        handed = [c for c in own if c.decode is not None]
        assert {c.prefill.layout for c in handed} == layouts
        assert {c.decode.layout for c in handed if c.decode is not None} == layouts
    for family in ONE_GROUP:
        own = [c for c in found if c.spec.model == f"{FOLDER}{family}-one-group"]
        pairs = {(c.prefill.tp, c.decode.tp) for c in own if c.decode is not None}
        assert pairs == {(p, d) for p in (1, 2, 4) for d in (1, 2, 4) if p != d}
