"""What of paced engines, and of traces, is refused before anything starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayk.specs import load_spec, plan_cells
from rayk.specs.server_plan import ServerOptions, note_unused_tensors, plan_server
from rayk.specs.traces import TraceSpec
from rayk.traces import FORMATS
from rayk.types.errors import CheckpointError, SpecError
from tests.specs.models import decoder, spec

PACED = {"compute": "paced", "costs": "costs"}


def plan(**changes: Any) -> Any:
    return [cell for cell, _ in plan_cells(load_spec(spec(**changes)), decoder(), device="cpu")]


@pytest.mark.parametrize(
    ("changes", "problem", "mend"),
    [
        ({"engine": {"compute": "paced"}}, "paced without cost tables", "rayk costs"),
        ({"engine": {"costs": "c"}}, "costs is of engines that compute nothing", "compute: paced"),
        ({"engine": {"pace": 2.0}}, "pace is of engines that compute nothing", "compute: paced"),
        ({"engine": PACED | {"pp": 2}}, "paced with pp: 2", "pp: 1"),
        ({"engine": PACED | {"async_scheduling": "always"}}, "paced with async_scheduling: always", "auto"),
        (
            {"engine": PACED, "checks": ["tokens", "kv_values"]},
            "paced with kv_values",
            r"\[tokens, kv_bytes\]",
        ),
        ({"engine": PACED, "sampling": {"logprobs": 1}}, "paced with logprobs", "leave out logprobs"),
    ],
)
def test_what_paced_engines_lack_is_refused(changes: dict[str, Any], problem: str, mend: str) -> None:
    with pytest.raises(SpecError, match=problem) as raised:
        plan(**changes)
    assert raised.value.mend
    with pytest.raises(SpecError, match=mend):
        plan(**changes)


def test_paced_cells_check_tokens_in_any_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = plan(engine=PACED | {"pace": 3.5}, dtype="bfloat16")
    assert cell.checks == ("tokens", "kv_bytes")
    assert [(e.compute, e.pace, e.costs) for e in cell.engines] == [("paced", 3.5, "costs")] * 2
    monkeypatch.chdir(tmp_path)
    Path("costs").mkdir()
    (cell,) = plan(engine=PACED)
    assert cell.prefill.costs == str(tmp_path / "costs"), "workers run elsewhere"


def test_a_paced_server_is_planned_from_a_config_alone(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    options = ServerOptions(
        model=str(tmp_path), num_prefill=2, num_decode=2, overrides=("engine.compute=paced", "engine.costs=c")
    )
    plan = plan_server(options, device="cpu")
    assert {e.config.compute for e in plan.settings.engines} == {"paced"}
    assert note_unused_tensors(plan) == ""
    with pytest.raises(SpecError, match="paced without cost tables"):
        plan_server(replace(options, overrides=options.overrides[:1]), device="cpu")
    with pytest.raises(CheckpointError, match="no .safetensors weights"):
        plan_server(replace(options, overrides=()), device="cpu")


def test_computing_and_pacing_may_be_an_axis() -> None:
    found = plan(engine={"costs": "costs"}, matrix={"engine.compute": ["real", "paced"]}, mode="aggregated")
    assert [cell.prefill.compute for cell in found] == ["real", "paced"]


def test_a_trace_is_named_by_its_file_and_how_it_is_replayed() -> None:
    trace = TraceSpec.model_validate({"file": "t.jsonl"})
    assert (trace.format, trace.speed, trace.block_tokens, trace.limit) == (None, 1.0, 512, None)
    assert [TraceSpec(file="t", format=name).format for name in FORMATS] == list(FORMATS)
    for wrong in ({"format": "burst"}, {"speed": 0}, {"block_tokens": 0}, {"limit": 0}, {"rate": 1}):
        with pytest.raises(ValidationError):
            TraceSpec.model_validate({"file": "t"} | wrong)
