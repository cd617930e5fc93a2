"""Two workers on one GPU: prefill and decode engines of one experiment, KV read from device memory."""

from __future__ import annotations

import pytest

from tests.markers import gpu, nixl, ray

pytestmark = [gpu, ray, nixl, pytest.mark.timeout(280)]


def test_cells_pass_with_all_workers_on_one_gpu(checkpoint, tmp_path):
    from rayk import Experiment, load  # here: a machine without Ray may lack pydantic too

    out = tmp_path / "run"
    Experiment(
        {
            "name": "one-gpu",
            "model": str(checkpoint("qwen3")),
            "device": "cuda",
            "gpus_per_worker": "auto",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "engine": {"max_seqs": 4},
            "matrix": [
                {"prefill.tp": 1, "decode.tp": 1, "prefill.layout": "LBNHC", "decode.layout": "BHLNC"},
                {"prefill.tp": 2, "decode.tp": 1},
            ],
            "checks": ["tokens", "kv_bytes", "kv_values"],
        }
    ).run(out)
    cells = load(out).cells
    assert cells["verdict"].isin(["PASS", "NEAR_TIE"]).all(), cells[["verdict", "reason"]]
    assert (cells["num_kv_bytes_checked"] > 0).all()
    assert set(cells["decode.attention_implementation"]) == {"triton"}
    assert set(cells["decode.decode_graphs"]) == {"1, 2, 4"}
