"""Paced engines as a run has them: processes on Ray, transfers by NIXL, a verdict by how pace was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.paced import make_up
from rayk import Experiment
from rayk.experiments.paced import BUSY_SHARE, LATE_SHARE
from rayk.specs import dump_spec, load_spec
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
