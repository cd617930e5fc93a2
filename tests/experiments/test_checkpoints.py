"""The `checkpoints:` of a spec: which are written, and when a run refuses to go by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayk.experiments.checkpoints import write_checkpoints
from rayk.models.families import load_config
from rayk.specs import LoadedSpec, dump_spec, load_spec
from rayk.types.errors import SpecError, UserError
from tests.spec_models import JOBS
from tests.specs.models import spec


def loaded(tmp_path: Path, checkpoints: Any, **changes: Any) -> LoadedSpec:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(spec(**changes) | {"checkpoints": checkpoints}, sort_keys=False))
    return load_spec(path)


def test_missing_ones_that_cells_run_are_written_and_changed_ones_refused(tmp_path: Path) -> None:
    model, idle = tmp_path / "model", tmp_path / "idle"
    named = {str(model): {"family": "qwen3", "config": {"num_hidden_layers": 2}}, str(idle): "llama"}
    asked = loaded(tmp_path, named, model=str(model))
    told: list[str] = []
    write_checkpoints(asked, told.append)
    assert told == [f"writing a tiny checkpoint of qwen3 to {model}"]
    assert load_config(model).num_layers == 2
    assert not idle.exists()
    write_checkpoints(asked, told.append)
    assert len(told) == 1, "what is there is kept"

    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    line = (tmp_path / "e.yaml").read_text().splitlines().index(f"  {model}:") + 1
    with pytest.raises(UserError, match="was changed after it was written: config.json") as refused:
        write_checkpoints(asked, told.append)
    assert refused.value.where == f"{tmp_path / 'e.yaml'}:{line}: {model}"
    (model / "rayk_checkpoint.json").unlink()
    with pytest.raises(UserError):
        write_checkpoints(asked, told.append)
    assert (model / "config.json").exists(), "a model that rayk did not write is left alone"
    assert len(told) == 1


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        (
            {"m": "qwen4"},
            r"e\.yaml:\d+: checkpoints\.m\.family must be one of .* got 'qwen4'\n  mend: .*'qwen3'",
        ),
        (
            {"m": {"family": "qwen3", "sed": 1}},
            r"e\.yaml:\d+: unknown key 'sed' in 'checkpoints\.m'\n.*'seed'",
        ),
        ({"m": {"config": {}}}, r"checkpoints\.m\.family is missing"),
        ({"m": {"family": "qwen3", "seed": -1}}, r"checkpoints\.m\.seed must be greater than or equal to 0"),
        ({"m": {"family": "qwen3", "dtype": "auto"}}, r"checkpoints\.m\.dtype must be one of"),
        ({"": "qwen3"}, "checkpoints"),
        (["qwen3"], r"checkpoints must be a valid dictionary"),
        ({f"m{i}": "qwen3" for i in range(1001)}, "checkpoints must .* at most 1000 items"),
    ],
)
def test_bad_ones_are_named_with_their_line(tmp_path: Path, checkpoints: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(tmp_path, checkpoints)


def test_values_no_model_can_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    asked = loaded(tmp_path, {"m": {"family": "qwen3", "config": {"vocab_size": 12}}}, model="m")
    with pytest.raises(UserError, match=r"e\.yaml:\d+: vocab_size 12 cannot hold 256 bytes"):
        write_checkpoints(asked, pytest.fail)


def test_they_are_no_axis_and_are_kept_with_the_results(tmp_path: Path) -> None:
    asked = loaded(tmp_path, {"m": {"family": "mamba2", "config": {"n_groups": 1}}})
    assert load_spec(yaml.safe_load(dump_spec(asked.spec))).spec == asked.spec
    with pytest.raises(SpecError, match="checkpoints cannot be an axis"):
        loaded(tmp_path, {}, matrix={"checkpoints": [{}]})


def test_each_spec_of_jobs_names_every_model_it_runs() -> None:
    others = {"plan.yaml", "transfer_sweep.yaml"}  # no experiments
    specs = {p.name: load_spec(p).spec for p in sorted(JOBS.glob("*.yaml")) if p.name not in others}
    assert {"hetero_tp.yaml", "hybrid.yaml", "groups.yaml", "chaos.yaml"} <= specs.keys()
    for name, found in specs.items():
        made = ["checkpoints/smollm2-135m"] if name.startswith("real") else []  # by `make real`
        assert sorted(found.models()) == sorted([*found.checkpoints, *made]), name
