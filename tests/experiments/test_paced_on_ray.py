"""Paced engines as a run has them: processes on Ray, transfers by NIXL, a verdict by how pace was kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.paced import make_up
from rayk import LLM, Experiment
from rayk.costs.book import CostBook
from rayk.costs.table import EngineCosts, engine_key
from rayk.experiments.paced import BUSY_SHARE, LATE_SHARE
from rayk.specs import dump_spec, load_spec
from rayk.specs.server_plan import ServerOptions, plan_server
from rayk.types.paced_tokens import PacedTokens
from rayk.types.request import SamplingParams
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]


def test_pages_move_and_tokens_follow_the_rule(
    ray_address: str, spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    costs = tmp_path / "costs"
    engine = {"compute": "paced", "costs": str(costs), "num_blocks": 128}
    asked = spec({"prefill.tp": 1, "decode.tp": 2}, engine=engine, checks=["tokens", "kv_bytes"])
    path = tmp_path / "e.yaml"
    path.write_text(dump_spec(load_spec(asked).spec), encoding="utf-8")
    make_up(str(path), [], costs)
    result = Experiment(asked).run(tmp_path / "run", address=ray_address)
    [cell] = result.cells.to_dict("records")
    assert cell["num_token_mismatches"] == 0
    assert cell["num_kv_bytes_mismatched"] == 0
    assert cell["num_kv_bytes_checked"] > 0
    assert set(cell["checks_done"]) == {"tokens", "kv_bytes"}
    # How busy the machine is that tests run on is nobody's to say.
    kept = cell["late_p99_share"] <= LATE_SHARE and cell["machine_busy_share"] <= BUSY_SHARE
    assert cell["verdict"] == ("PASS" if kept else "OUT_OF_PACE"), cell["reason"]
    assert (result.requests["tpot_ms"] >= 20).all(), "a step of the tables takes more"


def test_a_server_of_paced_engines_answers_by_the_rule(
    ray_address: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a model whose config.json alone is there."""
    model, costs = tmp_path / "model", tmp_path / "costs"
    model.mkdir()
    shutil.copy(checkpoint("qwen3") / "config.json", model)
    settings = {"engine.compute": "paced", "engine.costs": str(costs), "engine.num_blocks": 64}
    overrides = tuple(f"{name}={value}" for name, value in settings.items())
    options = ServerOptions(model=str(model), device="cpu", num_prefill=1, num_decode=1, overrides=overrides)
    plan, flat = plan_server(options), EngineCosts.flat(5e6)
    keys = {engine_key(plan.config, entry.config) for entry in plan.settings.engines}
    CostBook(engines={key: replace(flat, key=key) for key in keys}).save(costs)
    prompts = [list(range(7, 60)), [3, 1, 4], list(range(100, 20, -1))]
    asked = SamplingParams(max_tokens=6)
    with LLM(model, device="cpu", num_prefill=1, num_decode=1, settings=settings, address=ray_address) as llm:
        answers = llm.generate(prompts, asked)
    rule = PacedTokens(plan.config.vocab_size, plan.config.eos_token_ids)
    assert [list(answer.token_ids) for answer in answers] == [rule.outputs(p, asked) for p in prompts]
    assert {answer.finish_reason for answer in answers} == {"length"}
