"""Deployed host tiers behind engines with a drafter, and behind one with and one without."""

from __future__ import annotations

from typing import Any

import pytest

from rayk import Experiment, load
from tests.actors.test_offload import LENGTHS, WHOLE
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]


@pytest.fixture(scope="module")
def run(ray_address: Any, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model drafts for itself: it foresees all that it says from right rows."""
    out, model = tmp_path_factory.mktemp("offload") / "run", str(checkpoint("qwen3"))
    drafts = {"method": "draft", "model": model, "num_tokens": 4}
    Experiment(
        {
            "name": "offload-drafts",
            "model": model,
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": LENGTHS, "seed": 0}},
            "sampling": {"max_tokens": 16, "ignore_eos": True},
            "engine": {"max_batch_tokens": 128},
            "speculative": drafts,
            "offload": {"host_gib": 0.05, "keep": "run", "load": "always"},
            "matrix": [
                {"mode": "aggregated", "prefill.tp": 2, "prefill.layout": "LBNHC", "speculative.tp": 2},
                {"mode": "aggregated", "prefill.layout": "BLHNC", "prefill.block_size": 32},
                {"transfer.path": "host", "decode.tp": 2},
                {"transfer.path": "host", "prefill.speculative.method": "none"},
            ],
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(out, address=ray_address)
    return load(out)


def test_every_cell_passes_and_gives_every_block_back(run: Any) -> None:
    assert run.cells["verdict"].tolist() == ["PASS"] * 4, run.cells["reason"].tolist()
    assert run.cells["num_blocks_held"].tolist() == [0] * 4
    assert (run.cells["num_blocks_leased"] == run.cells["num_blocks_freed"]).all()
    assert run.requests["offload_failure"].isna().all()


def test_what_is_loaded_is_drafted_from_as_if_it_had_been_computed(run: Any) -> None:
    found = run.requests.pivot_table(index="cell_id", columns="prompt_index", values="num_host_tokens")
    assert found.loc[run.cells["cell_id"][:3]].to_numpy().tolist() == [[0, 0, 0], WHOLE, WHOLE]
    assert (run.cells["num_accepted"] == run.cells["num_drafted"]).all()
    assert (run.cells["num_drafted"][:3] > 0).all()


def test_hand_overs_through_the_tier_bring_rows_of_drafts_where_there_are_any(run: Any) -> None:
    """One engine of the last cell has no drafter: the tier is both's."""
    told = [
        run.requests[run.requests["cell_id"] == cell]["draft_kv"].tolist() for cell in run.cells["cell_id"]
    ]
    assert told == [["own"] * 3, ["own"] * 3, ["moved"] * 3, ["recomputed"] * 3]
    handed = run.transfers[run.transfers["purpose"] == "handover"]
    assert handed["cell_id"].unique().tolist() == run.cells["cell_id"][2:].tolist()
