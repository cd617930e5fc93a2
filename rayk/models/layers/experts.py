"""A rank's experts, read from each form of checkpoint (WeightNames.experts)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayk.kernels.scaled_matmul import ScaledWeight
from rayk.models.build import Build
from rayk.models.config import ExpertsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The rank's E experts (possibly none), of inner size I: x @ weight + bias, twice.

    `width` is the size of their input: the hidden size, or that of a latent.
    """

    gate_up: torch.Tensor | ScaledWeight
    """[E, width, 2 I]: gate columns, then up columns; [E, width, I] without gates. Kept in fp8: rows of W."""
    down: torch.Tensor | ScaledWeight
    """[E, I, width]; kept in fp8: rows of W."""
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 I] or [E, I]"""
    down_bias: torch.Tensor | None = None
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
        """Sort gate and up columns, which alternate on disk (gpt_oss/modeling_gpt_oss.py:81)."""
        return cls(
            gate_up=torch.cat([gate_up[..., ::2], gate_up[..., 1::2]], dim=-1),
            gate_up_bias=torch.cat([gate_up_bias[..., ::2], gate_up_bias[..., 1::2]], dim=-1),
            down=down,
            down_bias=down_bias,
        )

    @property
    def count(self) -> int:
        return self.down.shape[0]


def build_experts(build: Build, index: int, mlp: ExpertsConfig, own_experts: range) -> Experts:
    """Build experts `own_experts` of layer `index`."""
    form = build.pieces.names.experts
    if form == "single":
        return _single(build, index, mlp, own_experts)
    assert mlp.kind == ("clamped" if form == "interleaved" else "swiglu"), mlp
    width, size, total = build.config.hidden_size, mlp.intermediate_size, mlp.num_experts
    read = build.pieces.experts
    if form == "stacked":
        gate_up = read(index, "experts_gate_up.weight", own_experts, (total, 2 * size, width))
        return Experts(
            gate_up=gate_up.mT, down=read(index, "experts_down.weight", own_experts, (total, width, size)).mT
        )
    gate_up = read(index, "experts_gate_up.weight", own_experts, (total, width, 2 * size))
    down = read(index, "experts_down.weight", own_experts, (total, size, width))
    if form == "halves":
        return Experts(gate_up=gate_up, down=down)
    assert form == "interleaved", form
    return Experts.from_interleaved(
        gate_up=gate_up,
        gate_up_bias=read(index, "experts_gate_up.bias", own_experts, (total, 2 * size)),
        down=down,
        down_bias=read(index, "experts_down.bias", own_experts, (total, width)),
    )


def _single(build: Build, index: int, mlp: ExpertsConfig, own_experts: range) -> Experts:
    """Read experts that are stored in tensors of one expert each, as rows of W."""
    width, size = mlp.latent_size or build.config.hidden_size, mlp.intermediate_size
    parts = ("experts_up",) if mlp.kind == "relu2" else ("experts_gate", "experts_up")
    reader, names = build.pieces.reader, build.pieces.names
    # Check all experts, since other ranks need the others.
    for expert in range(mlp.num_experts):
        for part in parts:
            reader.require(names.of_expert(index, expert, f"{part}.weight"), (size, width))
        reader.require(names.of_expert(index, expert, "experts_down.weight"), (width, size))
    inner = [[names.of_expert(index, expert, f"{part}.weight") for part in parts] for expert in own_experts]
    outer = [[names.of_expert(index, expert, "experts_down.weight")] for expert in own_experts]
    kept = build.pieces.kept_experts((inner, (size, width)), (outer, (width, size)))
    if kept is not None:
        return Experts(gate_up=kept[0], down=kept[1])
    gate_up = build.pieces.empty(len(own_experts), len(parts) * size, width)
    down = build.pieces.empty(len(own_experts), width, size)
    for slot in range(len(own_experts)):
        for rows, name in zip(torch.split(gate_up[slot], size), inner[slot], strict=True):
            rows.copy_(reader.read(name, (size, width)))
        down[slot].copy_(reader.read(outer[slot][0], (width, size)))
    return Experts(gate_up=gate_up.mT, down=down.mT)
