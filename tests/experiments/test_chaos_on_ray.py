"""Ranks that die, stop and come back on a real cluster: what failure policies save, and what nobody can."""

from __future__ import annotations

import pandas as pd
import pytest

from rayk import Experiment
from rayk.reports import exit_code
from tests.experiments.conftest import wait_until, worker_processes
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def result(ray_address, checkpoint, tmp_path_factory):
    """One prefill engine in all cells: who migrates goes back to it."""
    cells = [
        ("recompute", {"kind": "kill", "point": "prefill", "step": 1}),
        ("migrate", {"kind": "restart", "point": "notify"}),
        ("recompute", {"kind": "stop", "point": "post"}),
        ("recompute", {"kind": "drop", "point": "mid_transfer"}),
        ("migrate", {"kind": "corrupt", "point": "reserve"}),
        ("migrate", {"kind": "kill", "point": "post"}),
        ("fail", {"kind": "drop", "point": "free"}),
    ]
    matrix = [{"failure_policy": policy, "faults": [[fault]]} for policy, fault in cells]
    return Experiment(
        {
            "name": "chaos",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 2, "input_tokens": [37, 300], "seed": 0}},
            "sampling": {"max_tokens": MAX_TOKENS, "ignore_eos": True},
            "engine": {"num_blocks": 64},
            "transfer": {"lease_s": 1.5},
            "matrix": matrix,
            "deadlines": {"cell_s": 90.0, "request_s": 60.0, "transfer_s": 3.0},
        }
    ).run(tmp_path_factory.mktemp("chaos") / "run", address=ray_address)


def test_every_cell_ends_in_its_verdict_with_an_empty_ledger(result):
    cells = result.cells
    assert cells["verdict"].tolist() == ["PASS"] * 5 + ["ENGINE_ERROR", "PASS"]
    assert cells["met"].all(), cells["reason"].tolist()
    assert exit_code(cells) == 0
    assert (cells["num_blocks_held"] == 0).all()
    assert (cells["num_blocks_leased"] == cells["num_blocks_freed"]).all()
    assert cells["num_blocks_leased"][6] == 2 * (3 + 19), "both prompts' blocks, on both sides"
    assert not any("left no trace" in reason for reason in cells["reason"])


def test_rows_say_what_failed_and_what_saved_it(result):
    rows = [result.requests[result.requests["cell_id"] == c] for c in result.cells["cell_id"]]
    for row in (r for cell in rows[:5] for r in cell.to_dict("records")):
        assert pd.isna(row["error"])
        assert len(row["output_token_ids"]) == MAX_TOKENS
        assert pd.isna(row["failure"]) == pd.isna(row["recovered_by"]) == (row["num_attempts"] == 1)
    killed, restarted, stopped, dropped, changed = (cell.to_dict("records") for cell in rows[:5])
    assert {r["recovered_by"] for r in killed} == {"recompute"}
    assert {r["kv_path"] for r in killed} == {"recomputed"}
    assert [r["num_recomputed_tokens"] for r in killed] == [r["num_prompt_tokens"] for r in killed]
    assert "prefill0 rank 0 died" in killed[0]["failure"]
    assert {r["prefill_engine"] for r in restarted} == {"prefill0"}, "its new life takes them again"
    assert {r["recovered_by"] for r in restarted} == {"migrate"}
    assert {r["kv_path"] for r in restarted} == {"remote"}
    assert "recompute" in {r["recovered_by"] for r in stopped}
    (lost,) = [r for r in dropped if not pd.isna(r["failure"])]
    assert "deadline passed" in lost["failure"]
    assert lost["num_recomputed_tokens"] == lost["num_prompt_tokens"] - lost["num_valid_tokens"]
    (refused,) = [r for r in changed if not pd.isna(r["failure"])]
    assert "the seal does not fit" in refused["failure"]
    assert refused["num_attempts"] == 2
    assert rows[5]["error"].notna().any(), "nobody else prefills"


def test_stopped_workers_are_replaced_and_nobody_stays(result):
    wait_until(lambda: not worker_processes(), "workers end with their run")
