"""gemma3n against transformers: its streams, the layers' own inputs, and layers that share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import Checkpoint, assert_right, write_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other-stream": {
        "altup_active_idx": 2,
        "altup_num_inputs": 3,
        "altup_correct_scale": False,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "intermediate_size": 101,
    },
    "one-stream": {"altup_num_inputs": 1, "num_kv_shared_layers": 0},
    "most-share": {
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING, SLIDING],
        "num_kv_shared_layers": 3,
        "tie_word_embeddings": True,
        "activation_sparsity_pattern": [0.95] * 5,
    },
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("gemma3n"), "gemma3n", **VARIANTS[request.param])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    """In chunks and in mixed batches."""
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)
