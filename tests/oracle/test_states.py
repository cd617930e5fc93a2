"""The reference's states by field, against what the layers' own projections put out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayk.oracle.checkpoint import read_marker
from rayk.oracle.reference import Reference
from rayk.oracle.text import FedText
from tests.conftest import CheckpointFactory
from tests.families import HYBRID
from tests.oracle.test_every_tensor_counts import load

SHAPES: dict[str, list[dict[str, tuple[int, int, int]]]] = {
    "mamba2": [{"conv_x": (8, 1, 48), "conv_b": (2, 1, 72), "conv_c": (2, 1, 72), "ssm": (8, 1, 384)}],
    "bamba": [{"conv_x": (8, 1, 48), "conv_b": (2, 1, 72), "conv_c": (2, 1, 72), "ssm": (8, 1, 384)}],
    "granitemoehybrid": [
        {"conv_x": (16, 1, 48), "conv_b": (2, 1, 72), "conv_c": (2, 1, 72), "ssm": (16, 1, 384)}
    ],
    "nemotron_h": [
        {"conv_x": (8, 1, 48), "conv_b": (2, 1, 72), "conv_c": (2, 1, 72), "ssm": (8, 1, 384)},
        {},
    ],
    "falcon_h1": [
        {
            "k": (2, 37, 16),
            "v": (2, 37, 16),
            "conv_x": (8, 1, 40),
            "conv_b": (2, 1, 48),
            "conv_c": (2, 1, 48),
            "ssm": (8, 1, 480),
        }
    ],
    "jamba": [{"conv_x": (12, 1, 48), "ssm": (12, 1, 128)}, {"k": (2, 37, 8), "v": (2, 37, 8)}],
    "qwen3_next": [{"conv_q": (2, 1, 48), "conv_k": (2, 1, 48), "conv_v": (8, 1, 72), "delta": (8, 1, 384)}],
    "deepseek_v3": [{"latent": (1, 37, 32), "rope": (1, 37, 8)}],
}
"""Of the first layers."""


@pytest.mark.parametrize("family", HYBRID)
def test_every_layer_has_its_fields(checkpoint: CheckpointFactory, family: str) -> None:
    path = checkpoint(family)
    prompt = read_marker(path)["probes"][1]["prompt"]
    layers = Reference(path).caches(prompt)
    config = load(path).config
    assert len(layers) == config.num_hidden_layers
    for expected, found in zip(SHAPES[family], layers, strict=False):
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected


def mamba2_taps(out: torch.Tensor) -> dict[str, torch.Tensor]:
    """z 128, x 8 x 16, B 2 x 24, C 2 x 24, dt 8."""
    return {
        "conv_x": out[:, 128:256].view(-1, 8, 16),
        "conv_b": out[:, 256:304].view(-1, 2, 24),
        "conv_c": out[:, 304:352].view(-1, 2, 24),
    }


def jamba_taps(out: torch.Tensor) -> dict[str, torch.Tensor]:
    """x 192, z 192."""
    return {"conv_x": out[:, :192].view(-1, 12, 16)}


def delta_taps(out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per key head q 16, k 16, v 4 x 24, z 4 x 24."""
    grouped = out.view(-1, 2, 224)
    return {
        "conv_q": grouped[:, :, :16],
        "conv_k": grouped[:, :, 16:32],
        "conv_v": grouped[:, :, 32:128].reshape(-1, 8, 24),
    }


@pytest.mark.parametrize("length", [2, 37])
@pytest.mark.parametrize(
    ("family", "layer", "projection", "split"),
    [
        ("mamba2", 2, "backbone.layers.2.mixer.in_proj", mamba2_taps),
        ("jamba", 3, "model.layers.3.mamba.in_proj", jamba_taps),
        ("qwen3_next", 4, "model.layers.4.linear_attn.in_proj_qkvz", delta_taps),
    ],
)
def test_taps_are_the_last_inputs_of_the_convolution_by_unit(
    checkpoint: CheckpointFactory,
    family: str,
    layer: int,
    projection: str,
    split: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    length: int,
) -> None:
    """Oldest first; zeros before a prompt that is shorter than the convolution."""
    path = checkpoint(family)
    prompt = read_marker(path)["probes"][1]["prompt"][:length]
    model = load(path)
    seen: list[torch.Tensor] = []

    def record(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        seen.append(output[0])

    model.get_submodule(projection).register_forward_hook(record)
    FedText(model).feed(prompt)
    found = Reference(path).caches(prompt)[layer]
    for name, inputs in split(seen[0]).items():
        padded = torch.cat([torch.zeros(3, *inputs.shape[1:]), inputs])[-3:]
        expected = padded.permute(1, 2, 0).flatten(1)[:, None]
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("family", ["mamba2", "jamba", "qwen3_next"])
def test_states_are_those_that_the_next_token_starts_from(checkpoint: CheckpointFactory, family: str) -> None:
    """A state put back, unit by unit, into another text's cache makes it go on as the first did."""
    path = checkpoint(family)
    model = load(path)
    probe = read_marker(path)["probes"][1]
    states = Reference(path).caches(probe["prompt"])
    right, other = FedText(model), FedText(model)
    right.feed(probe["prompt"])
    other.feed(read_marker(path)["probes"][2]["prompt"][: len(probe["prompt"])])
    kept = [layer for layer, fields in enumerate(states) if "ssm" in fields or "delta" in fields]
    with torch.inference_mode():
        for layer, fields in enumerate(states):
            cached = other.cache.layers[layer]
            if layer not in kept:
                cached.keys, cached.values = fields["k"][None].clone(), fields["v"][None].clone()
                continue
            recurrent = fields.get("ssm", fields.get("delta"))
            assert recurrent is not None
            cached.recurrent_states[0].copy_(recurrent.reshape(cached.recurrent_states[0].shape))
            taps = [fields[n].reshape(-1, 3) for n in fields if n.startswith("conv_")]
            cached.conv_states[0][0, :, 1:] = torch.cat(taps)
    token = probe["output"][:1]
    assert torch.allclose(other.feed(token), right.feed(token), atol=1e-4, rtol=0)
