"""llama4 against transformers: chunked layers, layers without positions, experts weighed at their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import Checkpoint, assert_right, write_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "all-routed": {
        "use_qk_norm": False,
        "moe_layers": [0, 1, 2, 3],
        "num_experts_per_tok": 1,
        "attention_chunk_size": 21,
    },
    "biases": {"attention_bias": True, "tie_word_embeddings": True, "attn_temperature_tuning": False},
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), "llama4", **VARIANTS[request.param])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    """Prompts longer than three chunks."""
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)
