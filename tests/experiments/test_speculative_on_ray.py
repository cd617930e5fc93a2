"""Cells with drafts beside the same cells without, on a real cluster: tokens are transformers', columns are
those of what was proposed, and the report compares the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayk import Experiment, load
from rayk.reports.drafts import draft_rows
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(400)]
NUM_TOKENS = 4
MAX_TOKENS = 40
KILLED = {"kind": "kill", "point": "prefill", "step": 1}


def spec_of(model: Path, prompts: Path, matrix: Any) -> dict[str, Any]:
    return {
        "name": "drafts",
        "model": str(model),
        "device": "cpu",
        "prompts": {"file": str(prompts)},
        "sampling": {"max_tokens": MAX_TOKENS, "ignore_eos": True},
        "speculative": {"num_tokens": NUM_TOKENS, "prompt_lookup_min": 1},
        "matrix": matrix,
        "checks": ["tokens", "kv_bytes"],
    }


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each says the same several times over, as an answer may again."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    again = [[7, 8, 9, 10] * 12, [3 + n * 7 % 500 for n in range(40)] * 2, [11, 12, 13] * 30]
    path.write_text("\n".join(json.dumps({"prompt_token_ids": tokens}) for tokens in again))
    return path


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"mode": ["aggregated"]}, id="aggregated"),
        pytest.param({"prefill.tp": [2], "decode.tp": [1]}, id="handed over", marks=thorough),
    ],
)
def test_drafted_cells_have_the_tokens_of_transformers_and_say_what_was_proposed(
    axes: dict[str, Any], prompts: Path, ray_address: Any, checkpoint: Any, tmp_path: Path
) -> None:
    matrix = {"speculative.method": [None, "ngram"], **axes}
    Experiment(spec_of(checkpoint("qwen3"), prompts, matrix)).run(tmp_path / "run", address=ray_address)
    result = load(tmp_path / "run")
    cells = result.cells.set_index("speculative.method")
    assert cells["verdict"].to_dict() == {"none": "PASS", "ngram": "PASS"}, cells["reason"].to_dict()
    assert cells.isna().loc["none", ["num_drafted", "accepted_by_position", "tokens_per_step"]].all()
    told = cells.loc["ngram"]
    of = {method: rows_of(result.requests, cells.loc[method, "cell_id"]) for method in ("none", "ngram")}
    tokens = [[list(t) for t in rows["output_token_ids"]] for rows in of.values()]
    assert tokens[0] == tokens[1]
    rows = of["ngram"]
    drafted = rows[rows["num_drafted"].notna()]
    assert len(drafted) > 0, "something is said twice"
    for row in drafted.to_dict(orient="records"):
        proposed, accepted = list(row["drafted_by_position"]), list(row["accepted_by_position"])
        assert sum(proposed) == row["num_drafted"]
        assert sum(accepted) == row["num_accepted"]
        assert len(proposed) <= NUM_TOKENS
        assert proposed == sorted(proposed, reverse=True)
        assert accepted == sorted(accepted, reverse=True)
        # Steps are counted by the times of their tokens, accepted tokens by the scheduler.
        assert len(row["output_token_ids"]) - 1 == row["num_decode_steps"] + row["num_accepted"]
    assert told["num_accepted"] == drafted["num_accepted"].sum() > 0
    assert told["tokens_per_step"] > 1
    (row,) = draft_rows(result)
    assert row["drafter"] == "ngram"
    assert row["speedup"] > 0
    assert '"drafts"' in (tmp_path / "run" / "report.html").read_text()


def rows_of(requests: Any, cell_id: str) -> Any:
    return requests[requests["cell_id"] == cell_id].sort_values("prompt_index")


@thorough
def test_what_ranks_that_died_owed_is_foreseen_all_the_same(
    prompts: Path, ray_address: Any, checkpoint: Any, tmp_path: Path
) -> None:
    """The model drafts for itself: where rows of draft layers are right, all that it proposes is accepted."""
    model = checkpoint("qwen3")
    spec = spec_of(model, prompts, {"prefill.tp": [2], "decode.tp": [1]})
    spec["speculative"] = {"method": "draft", "model": str(model), "num_tokens": NUM_TOKENS}
    spec |= {"failure_policy": "recompute", "faults": [KILLED], "transfer": {"lease_s": 1.5}}
    spec["deadlines"] = {"cell_s": 90.0, "request_s": 60.0, "transfer_s": 3.0}
    Experiment(spec).run(tmp_path / "run", address=ray_address)
    result = load(tmp_path / "run")
    (cell,) = result.cells.to_dict("records")
    assert cell["verdict"] == "PASS", cell["reason"]
    assert (result.requests["num_attempts"] > 1).any(), "a rank died"
    assert cell["num_accepted"] == cell["num_drafted"] > 0
