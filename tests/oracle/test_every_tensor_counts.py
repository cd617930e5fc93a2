"""Tiny checkpoints are worth comparing on: whatever a model forgets changes its greedy output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.oracle.checkpoint import read_marker
from tests.conftest import CheckpointFactory
from tests.families import ATTENTION
from tests.markers import one_per
from tests.spec_models import OTHER_STREAMS

# Mistakes of a model's author, as settings of a transformers model that makes them. A name "a.b" is
# `b` inside the mapping `a`.
MISTAKES: dict[str, list[dict[str, Any]]] = {
    "llama": [{"rope_parameters.rope_type": "default"}],
    "llama4": [
        {"attention_chunk_size": 63},
        {"attention_chunk_size": 65},
        {"layer_types": ["full_attention"] * 4},
        # Layer 2 gets positions; layer 1 loses them.
        {"no_rope_layers": [1, 1, 1, 1]},
        {"no_rope_layers": [1, 0, 0, 1]},
        {"attn_temperature_tuning": False},
        {"attn_scale": 0.4},
        {"floor_scale": 49},
        {"use_qk_norm": False},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"rope_parameters.rope_type": "default"},
    ],
    "mistral": [{"sliding_window": 49}, {"sliding_window": 51}],
    "gemma2": [
        {"sliding_window": 50},
        {"sliding_window": 52},
        {"attn_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
    ],
    "gemma3": [
        {"sliding_window": 52},
        {"sliding_window": 54},
        {"query_pre_attn_scalar": 16},
        {"rope_parameters.full_attention.rope_theta": 1000.0},
        {"rope_parameters.sliding_attention.rope_theta": 100000.0},
        {"rope_parameters.full_attention.rope_type": "default"},
        {"hidden_activation": "silu"},
    ],
    "gemma3n": [
        {"sliding_window": 46},
        {"sliding_window": 48},
        {"rope_parameters.full_attention.rope_theta": 1000.0},
        {"rope_parameters.sliding_attention.rope_theta": 100000.0},
        {"hidden_activation": "silu"},
        {"altup_active_idx": 1},
        {"altup_correct_scale": False},
        {"activation_sparsity_pattern": [0.0] * 6},
        {"activation_sparsity_pattern": [0.7, 0.5, 0.29, 0.0, 0.0, 0.0]},
    ],
    "gpt_oss": [
        {"sliding_window": 44},
        {"sliding_window": 46},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"swiglu_limit": 7.0},
        {"swiglu_alpha": 1.0},
        {"rope_parameters.rope_type": "default"},
        {"rope_parameters.truncate": True},
        {"rope_parameters.attention_factor": 1.0},
    ],
    "qwen3_moe": [
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": False},
    ],
    "phi3": [
        {"rope_parameters.short_factor": [1.0] * 9},
        {"rope_parameters.attention_factor": 1.0},
        {"rope_parameters.rope_type": "default"},
    ],
    "cohere2": [
        {"sliding_window": 42},
        {"sliding_window": 44},
        # Layer 0 loses its positions; layer 2 gets them.
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    ],
}


def load(path: Path, settings: Mapping[str, Any] | None = None) -> Any:
    """Under transformers, with other values in its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((path / "config.json").read_text())
    for name, value in (settings or {}).items():
        *outer, last = name.split(".")
        inside = values
        for key in outer:
            inside = inside[key]
        inside[last] = value
    values.pop("time_step_limit", None)  # its infinity is stored in a form that only from_pretrained reads
    config = AutoConfig.for_model(**values)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, config=config, **implementations).eval()


def same_output(model: Any, path: Path) -> bool:
    """Whether greedy decoding still gives the promised tokens: one look at prompt and output at once."""
    for probe in read_marker(path)["probes"]:
        fed = torch.tensor([probe["prompt"] + probe["output"][:-1]])
        with torch.inference_mode():
            logits = model(fed, logits_to_keep=len(probe["output"])).logits[0]
        if logits.argmax(-1).tolist() != probe["output"]:
            return False
    return True


def kinds_of(model: Any) -> dict[str, list[torch.nn.Parameter]]:
    """Parameters by name without the layer index."""
    kinds: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        kinds.setdefault(re.sub(r"layers\.\d+\.", "", name), []).append(parameter)
    return kinds


@contextmanager
def forgotten(parameter: torch.nn.Parameter, value: float) -> Iterator[None]:
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(value)
    yield
    with torch.no_grad():
        parameter.copy_(kept)


def neutral(family: str, kind: str) -> float:
    """What a model without the tensor would compute with."""
    if kind.endswith("sinks"):
        return float("-inf")
    neutral_is_one = "norm" in kind or kind.endswith("correct_output_scale")
    return 1.0 if neutral_is_one and family not in ("gemma2", "gemma3") else 0.0


# gemma3n has three times as many kinds of tensors as others; its layers are compared in tests/models.
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f == "gemma3n")) for f in ATTENTION]
)
def test_one_forgotten_tensor_changes_the_output(checkpoint: CheckpointFactory, family: str) -> None:
    """One tensor of one layer, for every kind and layer."""
    path = checkpoint(family)
    model = load(path)
    assert same_output(model, path)
    kinds = kinds_of(model)
    unnoticed = []
    for kind, parameters in kinds.items():
        for layer, parameter in enumerate(parameters):
            with forgotten(parameter, neutral(family, kind)):
                if same_output(model, path):
                    unnoticed.append((kind, layer))
    assert unnoticed == []
    assert same_output(model, path)


@pytest.mark.slow
def test_one_forgotten_tensor_of_other_streams_changes_the_output(checkpoint: CheckpointFactory) -> None:
    """gemma3n's second shape stores one kind of tensor that its config leaves unused."""
    path = checkpoint("gemma3n", overrides=dict(OTHER_STREAMS))
    model = load(path)
    unnoticed = {
        kind
        for kind, parameters in kinds_of(model).items()
        for parameter in parameters
        if is_unnoticed(model, path, parameter, neutral("gemma3n", kind))
    }
    assert unnoticed == {"model.altup.correct_output_scale"}


def is_unnoticed(model: Any, path: Path, parameter: torch.nn.Parameter, value: float) -> bool:
    with forgotten(parameter, value):
        return same_output(model, path)


def test_sinks_of_other_heads_change_the_output(checkpoint: CheckpointFactory) -> None:
    """As when a rank takes another's: moved by one head, or by the half that TP 2 splits."""
    path = checkpoint("gpt_oss")
    model = load(path)
    for sinks in kinds_of(model)["model.self_attn.sinks"]:
        for shift in (1, 4):
            kept = sinks.detach().clone()
            with torch.no_grad():
                sinks.copy_(kept.roll(shift))
                assert not same_output(model, path)
                sinks.copy_(kept)
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


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"final_logit_softcapping": None}),
        ("gemma3n", {"final_logit_softcapping": 1e6}),
        ("cohere2", {"logit_scale": 1.0}),
    ],
)
def test_settings_that_keep_the_order_of_logits_change_logprobs(
    checkpoint: CheckpointFactory, family: str, settings: dict[str, Any]
) -> None:
    """Greedy tokens cannot show them."""
    path = checkpoint(family)
    probe = read_marker(path)["probes"][1]
    with torch.inference_mode():
        right, wrong = (
            model(torch.tensor([probe["prompt"]]), logits_to_keep=1).logits[0, 0]
            for model in (load(path), load(path, settings))
        )
    assert int(right.argmax()) == int(wrong.argmax()) == probe["output"][0]
    assert abs(float(right.log_softmax(-1).max() - wrong.log_softmax(-1).max())) > 0.1


def test_both_experts_of_a_token_count(checkpoint: CheckpointFactory) -> None:
    """The second expert's weight, measured at every router; and the promised gap to the third."""
    path = checkpoint("gpt_oss")
    model, marker = load(path), read_marker(path)
    gaps: list[torch.Tensor] = []
    second: list[torch.Tensor] = []

    def look(_router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, weights, _chosen = output
        ranked = logits.sort(-1, descending=True).values
        gaps.append(ranked[:, 1] - ranked[:, 2])
        second.append(weights.min(-1).values)

    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(look)
    with torch.inference_mode():
        for probe in marker["probes"]:
            model(torch.tensor([probe["prompt"] + probe["output"][:-1]]))
    assert len(gaps) == 3 * 4
    smallest = float(torch.cat(gaps).min())
    assert smallest > 6e-4
    assert smallest == pytest.approx(marker["routing_gap"], abs=1e-4)
    assert 0.1 < float(torch.cat(second).mean()) < 0.4
