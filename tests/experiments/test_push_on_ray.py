"""Push between worker processes over NIXL: the same bytes as a pull, and the columns that tell of it."""

from __future__ import annotations

import pandas as pd
import pytest

from rayk import Experiment, load
from tests.experiments.test_on_ray import KV_BYTES, LAYERS
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]


@pytest.fixture(scope="module")
def run(ray_address, checkpoint, tmp_path_factory):
    matrix = [
        {"transfer.mode": "pull", "prefill.tp": 1, "decode.tp": 2},
        {"transfer.mode": "push", "prefill.tp": 1, "decode.tp": 2, "transfer.push_layers": 1},
        {"transfer.mode": "push", "prefill.tp": 2, "decode.tp": 1, "prefill.num_engines": 2},
    ]
    out = tmp_path_factory.mktemp("push") / "run"
    Experiment(
        {
            "name": "push",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "engine": {"max_batch_tokens": 128},
            "matrix": matrix,
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(out, address=ray_address)
    return load(out)


def test_every_cell_passes_with_every_byte_checked(run):
    assert run.cells["verdict"].tolist() == ["PASS"] * 3
    assert run.cells["num_kv_bytes_checked"].tolist() == [KV_BYTES] * 3
    assert run.cells["num_kv_bytes_mismatched"].tolist() == [0] * 3
    assert run.cells["num_blocks_held"].tolist() == [0] * 3
    assert (run.cells["num_blocks_leased"] == run.cells["num_blocks_freed"]).all()


def test_the_tables_tell_who_wrote_what_and_what_decoding_waited_for(run):
    assert (run.requests["exposed_ms"] > 0).all()
    rows = run.transfers.merge(run.cells[["cell_id", "decode.tp"]], on="cell_id")
    pulled, pushed = rows[rows["mode"] == "pull"], rows[rows["mode"] == "push"]
    assert len(pulled) == 3 * 2
    assert pulled["num_writes"].isna().all()
    by_layer = pushed[pushed["decode.tp"] == 2]
    assert len(by_layer) == 3 * 2
    assert (by_layer["num_layers_per_write"] == 1).all()
    assert (by_layer["num_writes"] >= LAYERS).all()
    assert (by_layer["num_early_writes"] <= by_layer["num_writes"]).all()
    assert (pushed["transport"] == "nixl/UCX").all()
    assert _bytes(pushed[pushed["decode.tp"] == 2]) == _bytes(pulled)


def _bytes(rows: pd.DataFrame) -> list[int]:
    return sorted(rows["bytes"].tolist())
