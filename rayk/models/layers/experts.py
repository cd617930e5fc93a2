"""A rank's experts, read in each form in which checkpoints have them (WeightNames.experts)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rayk.models.build import Build
    from rayk.models.config import ExpertsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The rank's E experts (none is allowed), of inner size I: x @ weight + bias, twice.

    `width` is the size of what they work on: the hidden size, or that of a latent.
    """

    gate_up: torch.Tensor
    """[E, width, 2 I]: gate columns, then up columns; [E, width, I] where there is no gate."""
    gate_up_bias: torch.Tensor | None
    """[E, 2 I] or [E, I]"""
    down: torch.Tensor
    """[E, I, width]"""
    down_bias: torch.Tensor | None
    """[E, width]"""

    @classmethod
    def from_interleaved(
        cls,
        *,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down: torch.Tensor,
        down_bias: torch.Tensor,
    ) -> Experts:
        """As stored: gate and up columns take turns (gpt_oss/modeling_gpt_oss.py:81)."""
        return cls(
            gate_up=torch.cat([gate_up[..., ::2], gate_up[..., 1::2]], dim=-1),
            gate_up_bias=torch.cat([gate_up_bias[..., ::2], gate_up_bias[..., 1::2]], dim=-1),
            down=down,
            down_bias=down_bias,
        )

    @classmethod
    def from_rows(cls, *, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """Matrices as linear maps have them: gate_up [E, 2 I or I, width], down [E, width, I]; no biases."""
        return cls.from_columns(gate_up=gate_up.mT, down=down.mT)

    @classmethod
    def from_columns(cls, *, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """As they are here, without biases."""
        return cls(gate_up=gate_up, gate_up_bias=None, down=down, down_bias=None)

    @property
    def count(self) -> int:
        """E."""
        return self.down.shape[0]


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
