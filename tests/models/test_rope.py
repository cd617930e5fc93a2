"""Rope of every kind against transformers' own: frequencies, cos and sin, and the rotation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from rayk.models.config import RopeConfig
from rayk.models.families import parse_config
from rayk.models.layers.rope import Rotary, inverse_frequencies, rotate
from tests.each import each
from tests.helpers import assert_matches
from tests.models import released
from tests.models.released import LLAMA3, small
from tests.models.tiny import LONGROPE

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
POSITIONS = torch.tensor([0, 1, 2, 77, 127, 2047])
CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-other": {**LLAMA3, "low_freq_factor": 2.0, "factor": 32.0},
    "yarn": YARN,
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-betas": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    # The upper border lies beyond the last pair.
    "yarn-long": {**YARN, "original_max_position_embeddings": 65536},
    # Both borders on pair 0: nothing is kept but the first pair.
    "yarn-one-border": {**YARN, "original_max_position_embeddings": 6},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.75},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.7},
    "yarn-shrinking": {**YARN, "factor": 0.5},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 7 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        "original_max_position_embeddings": 256,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "short_factor": [1.5] * 32,
        "long_factor": [2.0] * 32,
        "factor": 3.0,
        "original_max_position_embeddings": 256,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "short_factor": [1.5] * 32,
        "long_factor": [2.0] * 32,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 256,
    },
}


def parsed(raw: dict[str, Any], layer: int = 0) -> RopeConfig:
    rope = parse_config(raw).layers[layer].rope
    assert rope is not None
    return rope


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@each("kind", list(KINDS))
def test_every_kind_is_transformers_own(kind: str, dtype: torch.dtype) -> None:
    raw = small("llama", rope_scaling=KINDS[kind], head_dim=64)
    config = parsed(raw)
    theirs = transformers.LlamaConfig(**copy.deepcopy(raw))
    module = modeling_llama.LlamaRotaryEmbedding(theirs)
    expected, factor = module.inv_freq, 1.0
    if (name := KINDS[kind]["rope_type"]) != "default":
        expected, factor = ROPE_INIT_FUNCTIONS[name](theirs)
    assert torch.equal(inverse_frequencies(config), expected)
    assert config.attention_factor == factor
    positions = POSITIONS[:-1] if name == "longrope" else POSITIONS
    cos, sin = module(torch.empty(0, dtype=dtype), positions[None])
    rotation = Rotary(config, dtype=dtype, device=CPU).at(positions)
    # Theirs has every angle twice.
    assert torch.equal(rotation.cos[:, 0], cos[0, :, :32])
    assert torch.equal(rotation.sin[:, 0], sin[0, :, :32])


def test_borders_of_yarn_are_where_they_should_be() -> None:
    """The kinds above differ: none of the comparisons is with one that is the same by accident."""
    made = {
        kind: inverse_frequencies(parsed(small("llama", rope_scaling=rope, head_dim=64)))
        for kind, rope in KINDS.items()
        if not kind.startswith(("longrope", "yarn-mscale", "yarn-attention"))
    }
    for one in made:
        for other in made:
            assert one == other or not torch.equal(made[one], made[other]), (one, other)


def test_longrope_serves_while_transformers_uses_the_short_factors() -> None:
    """At the last position that is served transformers still has them, one later no more."""
    raw = released.PHI_4_MINI
    config = parse_config(raw)
    module = modeling_phi3.Phi3RotaryEmbedding(transformers.Phi3Config(**copy.deepcopy(raw)))
    rotary = Rotary(parsed(raw), dtype=torch.float32, device=CPU)
    for last, same in ((config.max_positions - 1, True), (config.max_positions, False)):
        positions = torch.tensor([3, last])
        cos, _ = module(torch.empty(0), positions[None])
        assert torch.equal(rotary.at(positions).cos[:, 0], cos[0, :, :48]) == same


def test_the_two_ropes_of_gemma3() -> None:
    raw = released.GEMMA_3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    module = modeling_gemma3.Gemma3RotaryEmbedding(transformers.Gemma3TextConfig(**copy.deepcopy(raw)))
    for layer, kind in ((0, "sliding_attention"), (5, "full_attention")):
        cos, sin = module(torch.empty(0, dtype=torch.bfloat16), POSITIONS[None], kind)
        rotation = Rotary(parsed(raw, layer), dtype=torch.bfloat16, device=CPU).at(POSITIONS)
        assert torch.equal(rotation.cos[:, 0], cos[0, :, :128])
        assert torch.equal(rotation.sin[:, 0], sin[0, :, :128])


def rotation_cases() -> list[Any]:
    oss = {k: v for k, v in released.GPT_OSS_20B.items() if k != "quantization_config"}
    phi = released.PHI_4_MINI | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    return [
        pytest.param(oss, modeling_gpt_oss, "GptOss", id="half"),
        pytest.param(phi | {"rope_scaling": LONGROPE}, modeling_phi3, "Phi3", id="partial"),
        pytest.param(released.COMMAND_R7B, modeling_cohere2, "Cohere2", id="interleaved"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("raw", "module", "name"), rotation_cases())
def test_rotation_is_transformers_own(
    raw: dict[str, Any], module: Any, name: str, dtype: torch.dtype
) -> None:
    """Bit for bit: each pairing is rounded where theirs is."""
    config = parse_config(raw)
    theirs = getattr(transformers, f"{name}Config")(**copy.deepcopy(raw))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(POSITIONS) - 1, 3, config.head_size, generator=generator).to(dtype)
    angles = getattr(module, f"{name}RotaryEmbedding")(theirs)(x, POSITIONS[None, :-1])
    expected, _ = module.apply_rotary_pos_emb(x[None], x[None], *angles, unsqueeze_dim=2)
    turned = rotate(x, Rotary(parsed(raw), dtype=dtype, device=CPU).at(POSITIONS[:-1]))
    assert torch.equal(turned, expected[0])


def test_partial_interleaved_rotation() -> None:
    """No family has it; the pairs are (0, 1), (2, 3) and the rest passes through."""
    config = RopeConfig(kind="default", theta=10.0, rotary_size=4, pairing="interleaved")
    x = torch.arange(12.0).view(2, 1, 6) + 1
    turned = rotate(x, Rotary(config, dtype=torch.float32, device=CPU).at(torch.tensor([0, 3])))
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., 4:], x[..., 4:])
    whole = rotate(x[..., :4], Rotary(config, dtype=torch.float32, device=CPU).at(torch.tensor([0, 3])))
    assert torch.equal(turned[..., :4], whole)
    angles = 3 * inverse_frequencies(replace(config, pairing="half"))
    exact, eager = (
        torch.view_as_real(
            torch.view_as_complex(x[1, 0, :4].to(dtype).view(2, 2))
            * torch.polar(torch.ones(2, dtype=dtype), angles.to(dtype))
        ).flatten()
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches(turned[1, 0, :4], exact, eager)
