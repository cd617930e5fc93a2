"""Mamba2: a matrix per head that decays at one rate (mamba2/modeling_mamba2.py:373).

Shapes: T packed tokens, B state slots, H heads of the rank of P channels each, G groups of B and C that they
read, N the state's size, W taps of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan import ssd_scan
from rayk.models.build import Build
from rayk.models.config import Mamba2Config
from rayk.models.layers.causal_conv import CausalConv, ConvPart
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import GatedNorm
from rayk.models.layers.places import Places
from rayk.models.layers.state import StateMixer
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard

READERS = "Mamba heads"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Heads:
    """The rank's heads: heads are divided, and each rank holds the groups of B and C that its heads read."""

    ids: tuple[int, ...]
    """Global ids of the heads."""
    groups: tuple[int, ...]
    """Global ids of the groups."""
    head_size: int
    state_size: int
    group_index: torch.Tensor
    """[H] int64, on the layer's device: the local group of each local head."""

    @property
    def inner(self) -> int:
        """H * P."""
        return len(self.ids) * self.head_size

    @property
    def group_width(self) -> int:
        """G * N."""
        return len(self.groups) * self.state_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Weights:
    inputs: Linear
    """hidden -> z, x, B, C and dt of the rank's heads and groups."""
    multipliers: torch.Tensor | None
    """[outputs of `inputs`]: factors on them."""
    conv: CausalConv
    decay: torch.Tensor
    """[H] float32: -exp(A_log)."""
    skip: torch.Tensor
    """[H] float32: D."""
    dt_bias: torch.Tensor
    """[H] float32"""
    norm: GatedNorm
    out: RowParallelLinear
    """[T, H * P] -> hidden"""


class Mamba2(StateMixer):
    """One rank's heads of one layer."""

    def __init__(
        self,
        *,
        layer: int,
        heads: Mamba2Heads,
        weights: Mamba2Weights,
        in_multiplier: float = 1.0,
        out_multiplier: float = 1.0,
    ) -> None:
        shape = (heads.head_size, heads.state_size)
        super().__init__(layer=layer, conv=weights.conv, field="ssm", units=heads.ids, shape=shape)
        self.heads = heads
        self._weights = weights
        self._in_multiplier = in_multiplier
        self._out_multiplier = out_multiplier

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the step's Segments; positions are not used."""
        state = self._bound()
        segments: Segments = metadata
        w, heads = self._weights, self.heads
        parts = w.inputs.forward(x if self._in_multiplier == 1.0 else x * self._in_multiplier)
        if w.multipliers is not None:
            parts = parts * w.multipliers
        inner, group_width = heads.inner, heads.group_width
        z, xbc, dt = torch.split(parts, [inner, inner + 2 * group_width, len(heads.ids)], dim=-1)
        xbc = w.conv.forward(xbc, segments)
        xs, b, c = torch.split(xbc, [inner, group_width, group_width], dim=-1)
        y = ssd_scan(
            xs.view(len(x), -1, heads.head_size),
            dt,
            w.decay,
            b.view(len(x), -1, heads.state_size),
            c.view(len(x), -1, heads.state_size),
            w.skip,
            w.dt_bias,
            heads.group_index,
            state,
            segments,
        )
        out = w.out.forward(w.norm.forward(y, z))
        return out if self._out_multiplier == 1.0 else out * self._out_multiplier


def build_mamba2(build: Build, index: int) -> Mamba2:
    config = build.config.mamba2
    assert config is not None
    heads = _heads(build, config)
    z, x, b, c, dt = _input_parts(config, heads)
    decay, skip, dt_bias = (
        build.per_head(index, name, config.num_heads, heads.ids) for name in ("ssm_a", "ssm_d", "ssm_dt_bias")
    )
    weights = Mamba2Weights(
        inputs=build.linear(index, (z, x, b, c, dt), bias=config.proj_bias),
        multipliers=_multipliers(build, config, heads),
        conv=_conv(build, index, config, heads),
        decay=-decay.exp(),
        skip=skip,
        dt_bias=dt_bias,
        norm=_norm(build, index, config, heads),
        out=build.row_parallel(index, Rows("ssm_out", x.size, x.rows), bias=config.out_bias),
    )
    return Mamba2(
        layer=index,
        heads=heads,
        weights=weights,
        in_multiplier=config.in_multiplier,
        out_multiplier=config.out_multiplier,
    )


def _heads(build: Build, config: Mamba2Config) -> Mamba2Heads:
    ids = shard.query_heads(config.num_heads, *build.tp, READERS)
    counts = (config.num_heads, config.num_groups)
    index = shard.kv_index(*counts, *build.tp)
    return Mamba2Heads(
        ids=ids,
        groups=shard.kv_heads(*counts, *build.tp, READERS),
        head_size=config.head_size,
        state_size=config.state_size,
        group_index=torch.tensor(index, dtype=torch.int64, device=build.pieces.device),
    )


def _input_parts(config: Mamba2Config, heads: Mamba2Heads) -> tuple[Rows, ...]:
    """List the rows of z, x, B, C and dt, in the order of the stored input projection."""
    inner, width = config.num_heads * config.head_size, config.num_groups * config.state_size
    channels = head_rows(heads.ids, config.head_size)
    groups = head_rows(heads.groups, config.state_size)
    return (
        Rows("ssm_in", inner, channels),
        Rows("ssm_in", inner, channels),
        Rows("ssm_in", width, groups),
        Rows("ssm_in", width, groups),
        Rows("ssm_in", config.num_heads, head_rows(heads.ids, 1)),
    )


def _multipliers(build: Build, config: Mamba2Config, heads: Mamba2Heads) -> torch.Tensor | None:
    """Spread each part's multiplier over the projection's outputs (falcon_h1/modeling_falcon_h1.py:948)."""
    if set(config.part_multipliers) == {1.0}:
        return None
    sizes = (heads.inner, heads.inner, heads.group_width, heads.group_width, len(heads.ids))
    parts = [torch.full((size,), by) for size, by in zip(sizes, config.part_multipliers, strict=True)]
    return torch.cat(parts).to(build.pieces.dtype).to(build.pieces.device)


def _conv(build: Build, index: int, config: Mamba2Config, heads: Mamba2Heads) -> CausalConv:
    _, x, b, c, _ = _input_parts(config, heads)
    rows = tuple(Rows("ssm_conv", part.size, part.rows) for part in (x, b, c))
    weight = build.pieces.stacked(index, rows, "weight", (1, config.conv_width)).squeeze(1)
    bias = build.pieces.stacked(index, rows, "bias", ()) if config.conv_bias else None
    parts = (
        ConvPart("conv_x", heads.ids, config.head_size),
        ConvPart("conv_b", heads.groups, config.state_size),
        ConvPart("conv_c", heads.groups, config.state_size),
    )
    return CausalConv(weight, bias, parts)


def _norm(build: Build, index: int, config: Mamba2Config, heads: Mamba2Heads) -> GatedNorm:
    inner = config.num_heads * config.head_size
    (rows,) = head_rows(heads.ids, config.head_size)
    name = build.name(index, "ssm_norm.weight")
    heads_per_group = config.num_heads // config.num_groups
    groups = torch.tensor([head // heads_per_group for head in heads.ids], device=build.pieces.device)
    return GatedNorm(
        None if config.gate == "plain" else build.pieces.rows(name, (inner,), rows),
        kind=config.gate,
        eps=config.norm_eps,
        head_groups=groups,
        num_groups=config.num_groups,
        group_size=inner // config.num_groups,
        comm=build.comm,
        is_whole=config.num_groups % build.comm.size == 0,
    )
