"""Fast prefill as an axis, through real workers and transfers: verdicts, and what was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rayk import Experiment, load
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]

LAYERS, FAST = 4, 2
NUM_PROMPTS, NUM_PROMPT_TOKENS, MAX_TOKENS = 3, 5 + 37 + 300, 12
KV_HEADS, HEAD_SIZE = 2, 16
KV_BYTES = NUM_PROMPT_TOKENS * (LAYERS - FAST) * KV_HEADS * 2 * HEAD_SIZE * 4
"""Float32 K and V of all prompts, in the layers that keep any."""


@pytest.fixture(scope="module")
def cells(ray_address: str, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Layers 2 and 3 attend to what layers 0 and 1 keep; by cell id."""
    fault = {"kind": "wrong_kv", "point": "store_kv", "layer": 1, "role": "prefill"}
    proofs = ["tokens", "kv_bytes", "kv_values"]
    matrix = [
        {
            "engine.fast_prefill": [False, True],
            "prefill.tp": 2,
            "engine.max_batch_tokens": 64,
            "checks": [proofs],
        },
        {"engine.fast_prefill": True, "mode": "aggregated", "dtype": "bfloat16"},
        {"prefill.fast_prefill": True, "faults": [[fault]], "checks": [proofs[1:]]},
    ]
    out: Path = tmp_path_factory.mktemp("fast-prefill") / "run"
    experiment = Experiment(
        {
            "name": "fast-prefill",
            "model": str(checkpoint("qwen3", overrides={"kv_sharing_targets": [None, None, 0, 1]})),
            "device": "cpu",
            "prompts": {"random": {"count": NUM_PROMPTS, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {"max_tokens": MAX_TOKENS, "ignore_eos": True},
            "decode": {"kernel_block_size": 4},
            "matrix": matrix,
        }
    )
    # transformers writes keys and values of every layer: k_proj, v_proj, k_norm of the two that share.
    with pytest.warns(UserWarning, match="6 tensors not used: "):
        experiment.run(out, address=ray_address)
    found = load(out).cells
    found.index = pd.Index(["off", "on", "logprobs", "wrong_kv"])
    return found


def test_every_proof_holds_with_it_and_without(cells: pd.DataFrame) -> None:
    both = cells.loc[["off", "on"]]
    assert both["verdict"].tolist() == ["PASS", "PASS"], both["reason"].tolist()
    assert both["engine.fast_prefill"].tolist() == [False, True]
    assert [set(checks) for checks in both["checks_done"]] == [{"tokens", "kv_bytes", "kv_values"}] * 2
    assert both["num_token_mismatches"].tolist() == [0, 0]
    # Layers that share hold nothing to compare, and send nothing.
    assert both["num_kv_bytes_checked"].tolist() == [KV_BYTES] * 2
    assert both["num_kv_values_checked"].tolist() == [KV_BYTES // 4] * 2
    assert len(set(both["transfer_bytes"])) == 1


def test_the_columns_say_what_kernels_make_of_blocks(cells: pd.DataFrame) -> None:
    assert [list(sizes) for sizes in cells["prefill.effective_kernel_block_sizes"]] == [[16]] * 4
    parts = cells["decode.effective_kernel_block_sizes"].drop("logprobs")
    assert [list(sizes) for sizes in parts] == [[4]] * 3
    assert cells["min_cut_kernel_block_size"].fillna(0).tolist() == [4, 4, 0, 4], "aggregated: whole blocks"


def test_the_columns_say_what_layers_computed(cells: pd.DataFrame) -> None:
    assert cells["num_fast_prefill_layers"].tolist() == [0, FAST, FAST, FAST]
    generated = NUM_PROMPTS * (MAX_TOKENS - 1)
    others = NUM_PROMPT_TOKENS * (LAYERS - FAST)
    assert cells.loc["off", "num_token_layers"] == NUM_PROMPT_TOKENS * LAYERS
    assert cells.loc["on", "num_token_layers"] == others + NUM_PROMPTS * FAST
    assert cells["decode.num_token_layers"].tolist()[:2] == [generated * LAYERS] * 2
    whole = cells.loc["logprobs"]
    assert whole["num_token_layers"] == others + NUM_PROMPTS * FAST + generated * LAYERS
    assert pd.isna(whole["decode.num_token_layers"]), "the engine does both"


def test_logprobs_are_checked_without_the_prompts_and_the_row_says_so(cells: pd.DataFrame) -> None:
    row = cells.loc["logprobs"]
    assert row["verdict"] == "PASS", row["reason"]
    assert list(row["checks_done"]) == ["logprobs"]
    assert row["num_logprobs_checked"] == NUM_PROMPTS * MAX_TOKENS
    assert pd.isna(row["num_prompt_logprobs_checked"])
    assert "logprobs did not see prompt tokens" in row["reason"]


def test_wrong_keys_of_a_layer_that_others_share_are_named(cells: pd.DataFrame) -> None:
    row = cells.loc["wrong_kv"]
    assert row["verdict"] == row["expected_verdict"] == "KV_MISMATCH"
    assert "layer 1, group 0, k, head 0, token 0" in row["reason"]
    assert "store_kv: token t holds token t-1" in row["reason"]
