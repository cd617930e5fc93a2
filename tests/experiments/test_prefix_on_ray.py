"""Prefix caching between worker processes: what requests of one prompt find stands in the tables."""

from __future__ import annotations

import json

import pytest

from rayk import Experiment, load
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]
NUM_REQUESTS, NUM_TOKENS = 3, 300
BLOCK_BYTES = 16 * 4 * 2 * 2 * 16 * 4
"""16 tokens in 4 layers, K and V of 2 heads of 16 elements."""


@pytest.fixture(scope="module")
def run(ray_address, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    prompts = folder / "prompts.jsonl"
    line = json.dumps({"prompt_token_ids": [3 + n * 7 % 500 for n in range(NUM_TOKENS)]})
    prompts.write_text(f"{line}\n" * NUM_REQUESTS)
    Experiment(
        {
            "name": "prefix",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"file": str(prompts)},
            "sampling": {"max_tokens": 6, "ignore_eos": True},
            "engine": {"prefix_caching": True},
            # One after the other.
            "prefill": {"tp": 1, "max_seqs": 1},
            "decode": {"tp": 2},
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(folder / "run", address=ray_address)
    return load(folder / "run")


def test_a_cell_passes_and_says_what_was_cached_and_held(run):
    (cell,) = run.cells.to_dict("records")
    assert cell["verdict"] in ("PASS", "NEAR_TIE")
    assert cell["num_blocks_held"] == 0
    # Blocks of 16 tokens, the last token aside; whoever came first computed all.
    assert sorted(run.requests["num_cached_tokens"]) == [0, 288, 288]
    assert cell["num_cached_tokens"] == 2 * 288
    # A transfer may begin before an earlier one's rows are the decode engine's own.
    assert cell["held_bytes"] in [n * 256 // 16 * BLOCK_BYTES for n in range(NUM_REQUESTS)]
    assert cell["transfer_bytes"] + cell["held_bytes"] == NUM_REQUESTS * 19 * BLOCK_BYTES
