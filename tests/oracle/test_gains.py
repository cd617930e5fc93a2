"""What decides how tensors are drawn is read from transformers' models, and agrees with what rayk reads in
their config.json."""

from __future__ import annotations

import torch
import transformers

from rayk.models.families import parse_config
from rayk.oracle.checkpoint import SUPPORTED, config_json
from rayk.oracle.draw import draw_weights
from rayk.oracle.gains import Gains
from rayk.oracle.tiny import family_values, make_config

UNPADDED = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TRANSPOSED = {"gpt_oss", "llama4"}


def test_gains_of_every_family_are_those_of_its_config() -> None:
    for family in SUPPORTED:
        config = make_config(family, family_values(family, {}) | UNPADDED)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        gains, ours = Gains.of(model), parse_config(config_json(config), family)
        assert gains.unit_offset == (ours.norm.offset == 1.0), family
        assert gains.closing_norms == (ours.block == "post_norms"), family
        assert (gains.head_gain < 1.8) == (ours.score_multiplier == 1.0), family
        assert gains.step_rows == (ours.mamba2.num_heads if ours.mamba2 else 0), family
        assert gains.transposed_experts == (family in TRANSPOSED), family
        draw_weights(model, seed=0, trial=0, dtype=torch.float32)
        assert Gains.of(model) == gains, f"{family}: weights are no part of it"
