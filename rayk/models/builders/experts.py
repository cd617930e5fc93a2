"""Reading a rank's experts, in each form in which checkpoints have them (WeightNames.experts)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayk.models.layers.moe import Experts

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import ExpertsConfig


def build_experts(build: Build, index: int, mlp: ExpertsConfig, held: range) -> Experts:
    """Experts `held` of layer `index`."""
    form = build.pieces.names.experts
    assert form in _FORMS, form
    return _FORMS[form](build, index, mlp, held)


def _interleaved(build: Build, index: int, mlp: ExpertsConfig, held: range) -> Experts:
    """Tensors of all experts, x @ W, with gate and up columns taking turns, and biases."""
    width, size, total = build.config.hidden_size, mlp.intermediate_size, mlp.num_experts
    assert mlp.kind == "clamped", mlp
    read = build.pieces.experts
    return Experts.from_interleaved(
        gate_up=read(index, "experts_gate_up.weight", held, (total, width, 2 * size)),
        gate_up_bias=read(index, "experts_gate_up.bias", held, (total, 2 * size)),
        down=read(index, "experts_down.weight", held, (total, size, width)),
        down_bias=read(index, "experts_down.bias", held, (total, width)),
    )


def _halves(build: Build, index: int, mlp: ExpertsConfig, held: range) -> Experts:
    """Tensors of all experts, x @ W, gate columns before up columns."""
    width, size, total = build.config.hidden_size, mlp.intermediate_size, mlp.num_experts
    assert mlp.kind == "swiglu", mlp
    read = build.pieces.experts
    return Experts.from_columns(
        gate_up=read(index, "experts_gate_up.weight", held, (total, width, 2 * size)),
        down=read(index, "experts_down.weight", held, (total, size, width)),
    )


def _stacked(build: Build, index: int, mlp: ExpertsConfig, held: range) -> Experts:
    """Tensors of all experts, rows of W, gate rows before up rows."""
    width, size, total = build.config.hidden_size, mlp.intermediate_size, mlp.num_experts
    assert mlp.kind == "swiglu", mlp
    read = build.pieces.experts
    return Experts.from_rows(
        gate_up=read(index, "experts_gate_up.weight", held, (total, 2 * size, width)),
        down=read(index, "experts_down.weight", held, (total, width, size)),
    )


def _single(build: Build, index: int, mlp: ExpertsConfig, held: range) -> Experts:
    """Tensors of one expert each, rows of W."""
    width, size = mlp.latent_size or build.config.hidden_size, mlp.intermediate_size
    parts = ("experts_up",) if mlp.kind == "relu2" else ("experts_gate", "experts_up")
    reader, names = build.pieces.reader, build.pieces.names
    # All of them must be there: those of other experts have their use on other ranks.
    for expert in range(mlp.num_experts):
        for part in parts:
            reader.require(names.of_expert(index, expert, f"{part}.weight"), (size, width))
        reader.require(names.of_expert(index, expert, "experts_down.weight"), (width, size))
    gate_up = build.pieces.empty(len(held), len(parts) * size, width)
    down = build.pieces.empty(len(held), width, size)
    for slot, expert in enumerate(held):
        inner = [names.of_expert(index, expert, f"{part}.weight") for part in parts]
        for rows, name in zip(torch.split(gate_up[slot], size), inner, strict=True):
            rows.copy_(reader.read(name, (size, width)))
        down[slot].copy_(reader.read(names.of_expert(index, expert, "experts_down.weight"), (width, size)))
    return Experts.from_rows(gate_up=gate_up, down=down)


_FORMS = {"interleaved": _interleaved, "halves": _halves, "stacked": _stacked, "single": _single}
