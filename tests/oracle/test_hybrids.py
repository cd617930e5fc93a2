"""Tiny checkpoints of hybrid models: whatever is forgotten, of weights, states or settings, shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.oracle.checkpoint import read_marker
from rayk.oracle.draw import drawn_tensors
from rayk.oracle.text import FedText
from tests.conftest import CheckpointFactory
from tests.families import HYBRID
from tests.markers import one_per
from tests.oracle.test_every_tensor_counts import forgotten, load, same_output
from tests.overrides import GATE_FIRST, LATENT_YARN, NO_EXPERTS, NO_POSITIONS
from tests.spec_models import ONE_GROUP

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"overrides": dict(values)}) for family, values in ONE_GROUP.items()),
    ("falcon_h1", {"overrides": dict(GATE_FIRST)}),
    ("granitemoehybrid", {"overrides": dict(NO_POSITIONS)}),
    ("granitemoehybrid", {"overrides": dict(NO_EXPERTS)}),
    ("deepseek_v3", {"overrides": dict(LATENT_YARN)}),
]

# Mistakes of a model's author, as settings of a transformers model that makes them.
MISTAKES: dict[str, list[dict[str, Any]]] = {
    "jamba": [{"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}],
    "bamba": [{"rope_parameters.partial_rotary_factor": 1.0}, {"rope_parameters.rope_theta": 500.0}],
    "granitemoehybrid": [
        {"position_embedding_type": None},
        {"embedding_multiplier": 1.0},
        {"residual_multiplier": 1.0},
        {"attention_multiplier": 0.25},
        {"num_experts_per_tok": 1},
    ],
    "nemotron_h": [
        {"topk_group": 2},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
    ],
    "falcon_h1": [
        {"embedding_multiplier": 1.0},
        {"key_multiplier": 1.0},
        {"attention_in_multiplier": 1.0},
        {"attention_out_multiplier": 1.0},
        {"ssm_in_multiplier": 1.0},
        {"ssm_out_multiplier": 1.0},
        {"mlp_multipliers": [1.0, 1.3]},
        {"mlp_multipliers": [0.8, 1.0]},
        *({"ssm_multipliers": [1.4, 0.7, 1.3, 0.8, 1.2][:i] + [1.0] + [1.4, 0.7, 1.3, 0.8, 1.2][i + 1 :]}
          for i in range(5)),
    ],
    "qwen3_next": [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 1},
        {"rope_parameters.partial_rotary_factor": 0.5},
    ],
    "deepseek_v3": [
        {"rope_interleave": False},
        {"topk_group": 4},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
    ],
}  # fmt: skip


def neutral(family: str, name: str) -> float:
    """What a model without the tensor would compute with."""
    plain = family != "qwen3_next" or "linear_attn.norm" in name
    return 1.0 if "norm" in name and plain else 0.0


SLOW = ("bamba", "deepseek_v3", "granitemoehybrid", "jamba")
"""What these are made of stands in other families too."""


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in HYBRID])
def test_one_forgotten_tensor_changes_the_output(checkpoint: CheckpointFactory, family: str) -> None:
    path = checkpoint(family)
    model = load(path)
    assert same_output(model, path)
    unnoticed = []
    for name, tensor in drawn_tensors(model):
        with forgotten(tensor, neutral(family, name)):
            if same_output(model, path):
                unnoticed.append(name)
    assert unnoticed == []
    assert same_output(model, path)


@one_per()
@pytest.mark.parametrize(
    ("family", "settings"), [(f, s) for f, found in MISTAKES.items() for s in found], ids=str
)
def test_a_wrong_setting_changes_the_output(
    checkpoint: CheckpointFactory, family: str, settings: dict[str, Any]
) -> None:
    path = checkpoint(family)
    assert not same_output(load(path, settings), path)


def decode(model: Any, path: Path, prompt_index: int, damage: Callable[[Any], None]) -> bool:
    """Whether decoding after a damaged prefill still gives the promised tokens."""
    probe = read_marker(path)["probes"][prompt_index]
    text = FedText(model)
    text.feed(probe["prompt"])
    with torch.inference_mode():
        damage(text.cache)
    output = [probe["output"][0]]
    while len(output) < 24:
        output.append(int(text.feed(output[-1:])[-1].argmax()))
        if output[-1] != probe["output"][len(output) - 1]:
            return False
    return True


def state_layers(model: Any) -> list[int]:
    types = getattr(model.config, "layer_types", None) or []
    return [i for i, kind in enumerate(types) if kind in ("linear_attention", "hybrid")]


def set_state(layer: int, change: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[Any], None]:
    """A damage to one layer's taps [channels, width] and state, in place."""

    def damage(cache: Any) -> None:
        cached = cache.layers[layer]
        change(cached.conv_states[0][0], cached.recurrent_states[0][0])

    return damage


QUICK = ("mamba2", "qwen3_next")
"""A state of either kind of scan; each of the others decodes for seconds."""
STATES = [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in HYBRID if f != "deepseek_v3"]


@pytest.mark.parametrize("family", STATES)
def test_a_wrong_state_changes_the_output(checkpoint: CheckpointFactory, family: str) -> None:
    """A lost state, half of it lost, halves swapped as by ranks; lost or moved taps, in each layer."""
    path = checkpoint(family)
    model = load(path)
    assert all(decode(model, path, prompt, lambda cache: None) for prompt in range(3))

    def lose_state(taps: torch.Tensor, state: torch.Tensor) -> None:
        state.zero_()

    def lose_half(taps: torch.Tensor, state: torch.Tensor) -> None:
        state[: len(state) // 2] = 0

    def swap_halves(taps: torch.Tensor, state: torch.Tensor) -> None:
        state.copy_(state.roll(len(state) // 2, 0))

    def lose_taps(taps: torch.Tensor, state: torch.Tensor) -> None:
        taps.zero_()

    def move_taps(taps: torch.Tensor, state: torch.Tensor) -> None:
        taps.copy_(taps.roll(1, -1))

    unnoticed = [
        (layer, change.__name__)
        for layer in state_layers(model)
        for change in (lose_state, lose_half, swap_halves, lose_taps, move_taps)
        if all(decode(model, path, prompt, set_state(layer, change)) for prompt in range(3))
    ]
    assert unnoticed == []


# mamba2's states, without attention beside them, forget within 300 tokens.
@pytest.mark.parametrize(
    ("family", "position"), [(f, p) for f in HYBRID for p in (0, 150) if (f, p) != ("mamba2", 0)]
)
def test_an_early_token_is_remembered(checkpoint: CheckpointFactory, family: str, position: int) -> None:
    """After 300 tokens the output still depends on one at the start or in the middle."""
    path = checkpoint(family)
    model = load(path)
    probe = read_marker(path)["probes"][2]
    fed = torch.tensor([probe["prompt"] + probe["output"][:-1]])
    fed[0, position] = 3 if int(fed[0, position]) != 3 else 4
    with torch.inference_mode():
        logits = model(fed, logits_to_keep=24).logits[0]
    assert logits.argmax(-1).tolist() != probe["output"]
