"""Cells that draft after hand-overs, on a real cluster: with a drafter on both sides, on one, and with faults
that spoil what came over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk import Experiment, load
from rayk.reports import exit_code
from rayk.reports.drafts import draft_rows
from rayk.types.fault_table import DRAFT_POINTS
from tests.markers import nixl, ray

pytestmark = [ray, nixl, pytest.mark.timeout(400)]
CHECKS = ["tokens", "kv_bytes", "kv_values", "drafts"]


@pytest.fixture(scope="module")
def result(ray_address: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model drafts for itself, so that all is accepted where its rows are right."""
    model = str(checkpoint("qwen3"))
    out: Path = tmp_path_factory.mktemp("drafted") / "run"
    faults = [{"faults": [{"kind": "wrong_drafts", "point": point}]} for point in DRAFT_POINTS]
    spec = {
        "name": "drafted",
        "model": model,
        "device": "cpu",
        "prompts": {"random": {"count": 4, "input_tokens": [37, 70], "seed": 0}},
        "sampling": {"max_tokens": 24, "ignore_eos": True},
        "speculative": {"method": "draft", "model": model, "num_tokens": 4},
        "matrix": [
            {"mode": "aggregated"},
            {"decode.tp": 2},
            {"prefill.speculative.method": "none"},
            *faults,
        ],
        "checks": CHECKS,
    }
    done = Experiment(spec).run(out, address=ray_address)
    assert exit_code(done.cells) == 0, done.cells[["cell_id", "verdict", "reason"]].to_string()
    return load(out)


def test_right_drafts_pass(result: Any) -> None:
    alone, both, d_alone = result.cells.to_dict("records")[:3]
    assert [cell["verdict"] for cell in (alone, both, d_alone)] == ["PASS"] * 3
    for cell in (alone, both, d_alone):
        assert cell["num_accepted"] == cell["num_drafted"] > 0
    assert set(both["checks_done"]) == set(CHECKS)
    assert "drafts" not in alone["checks_done"]
    for cell in (both, d_alone):
        assert cell["num_proposals_compared"] >= 4 * 10
        assert cell["num_proposals_differing"] == 0
    of = {cell["cell_id"]: how for cell, how in ((alone, "own"), (both, "moved"), (d_alone, "recomputed"))}
    for row in result.requests[result.requests["cell_id"].isin(of)].to_dict("records"):
        assert row["draft_kv"] == of[row["cell_id"]]
        is_whole = row["num_draft_rows_recomputed"] >= row["num_prompt_tokens"]
        assert is_whole == (row["draft_kv"] == "recomputed")
    assert both["num_kv_values_checked"] == 2 * d_alone["num_kv_values_checked"], "those of draft layers, too"


def test_wrong_drafts_are_named(result: Any) -> None:
    cells = result.cells.to_dict("records")[3:]
    assert len(cells) == len(DRAFT_POINTS)
    for cell in cells:
        assert cell["verdict"] == cell["expected_verdict"] == "DRAFT_MISMATCH", cell["reason"]
        assert "its KV of the prompt came over" in cell["reason"]
        assert cell["num_kv_bytes_mismatched"] == 0
        assert cell["num_token_mismatches"] == 0
        assert cell["num_accepted"] < 0.9 * cell["num_drafted"]


def test_the_report_has_both_acceptances_side_by_side(result: Any) -> None:
    rows = draft_rows(result)
    both = rows[1]
    assert both["aggregated_percent"] == 100
    assert both["acceptance_difference"] == 0
    for row in rows[3:]:
        assert row["acceptance_difference"] < -5
