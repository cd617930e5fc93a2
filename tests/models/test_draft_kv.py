"""What a drafter's rows of a prompt cost that came without, and what follows from that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rayk.models.drafters.draft_kv import draft_kv_costs, draft_kv_of, prefill_flops
from rayk.models.drafters.refusals import refuse_speculative, why_no_drafts
from rayk.oracle.eagle3 import write_eagle3
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.speculative import SpeculativeConfig
from tests.models.drafting import find
from tests.models.tiny import write_checkpoint

NUM_TOKENS = 40


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "gemma3", "deepseek_v3"])
def test_flops_of_a_prefill_are_those_that_torch_counts(tmp_path: Path, family: str) -> None:
    """Torch counts each product that transformers takes: attention of all pairs, not of earlier ones alone,
    experts that it may compute for all tokens, and the logits. So it counts somewhat more."""
    saved = write_checkpoint(tmp_path, family)
    config = saved.config
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        saved.model(torch.arange(3, 3 + NUM_TOKENS)[None], logits_to_keep=1)
    counted = counter.get_total_flops() - 2 * config.hidden_size * config.vocab_size
    estimated = prefill_flops(config, NUM_TOKENS)
    assert 0.5 * counted < estimated < 1.05 * counted
    assert prefill_flops(config, 2 * NUM_TOKENS) > 2 * estimated


def test_rows_of_a_smaller_model_are_computed_and_those_of_heads_lack(tmp_path: Path) -> None:
    large = write_checkpoint(tmp_path / "large", "llama", num_hidden_layers=6)
    small = write_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1)
    head = write_eagle3(tmp_path / "head", large.path, seed=3)
    drafts = SpeculativeConfig(method="draft", model=str(small.path))
    drafter = find(large, method="draft", model=str(small.path))
    costs = draft_kv_costs(drafter, large.config, "bfloat16", 100)
    assert 0 < costs.recompute_flops < costs.model_flops / 3
    assert costs.hidden_bytes == 0
    assert draft_kv_of(drafts, drafter, large.config, "float32") == "recompute"
    assert draft_kv_of(replace(drafts, draft_kv="none"), drafter, large.config, "float32") == "none"
    assert draft_kv_of(SpeculativeConfig(method="ngram"), None, large.config, "float32") == "none"
    drafter = find(large, method="eagle3", model=str(head))
    costs = draft_kv_costs(drafter, large.config, "bfloat16", 100)
    assert costs.hidden_bytes == 100 * 3 * large.config.hidden_size * 2
    assert costs.recompute_flops > costs.model_flops
    eagle3 = SpeculativeConfig(method="eagle3", model=str(head))
    assert draft_kv_of(eagle3, drafter, large.config, "float32") == "none"
    drafter = find(small, method="draft", model=str(large.path))
    assert draft_kv_of(drafts, drafter, small.config, "float32") == "none", "the prefill was cheaper"


def test_what_no_engine_does_is_refused_by_name(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, "llama").config

    def engine(**settings: str) -> EngineConfig:
        return EngineConfig(model=str(tmp_path), speculative=SpeculativeConfig(**settings))

    assert "hidden states do not travel" in str(
        why_no_drafts(engine(method="eagle3", model="h", draft_kv="hidden"))
    )
    assert "whole prompt again" in str(why_no_drafts(engine(method="mtp", draft_kv="recompute")))
    assert why_no_drafts(engine(method="draft", model="m", draft_kv="recompute")) is None
    assert why_no_drafts(engine(method="mtp", draft_kv="none")) is None
    for settings, word in (
        ({"method": "ngram", "draft_kv": "none"}, "draft_kv is for"),
        ({"method": "mtp", "draft_kv": "some"}, "draft_kv: some"),
    ):
        refused = engine(**settings)
        assert refused.speculative is not None
        with pytest.raises(UserError, match=word):
            refuse_speculative(refused.speculative, refused, config)
