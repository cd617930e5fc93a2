"""Building Mamba2 mixers: heads are divided, each rank holds the groups of B and C they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayk.models.layers.causal_conv import CausalConv, ConvPart
from rayk.models.layers.mamba2 import Mamba2, Mamba2Heads, Mamba2Weights
from rayk.models.layers.norm import GatedNorm
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import Mamba2Config

READERS = "Mamba heads"


def build_mamba2(build: Build, index: int) -> Mamba2:
    """The rank's heads of layer `index`."""
    config = build.config.mamba2
    assert config is not None
    heads = _heads(build, config)
    z, x, b, c, dt = _input_parts(config, heads)
    vectors = {name: _per_head(build, index, name, heads) for name in ("ssm_a", "ssm_d", "ssm_dt_bias")}
    weights = Mamba2Weights(
        inputs=build.linear(index, (z, x, b, c, dt), bias=config.proj_bias),
        multipliers=_multipliers(build, config, heads),
        conv=_conv(build, index, config, heads),
        decay=-vectors["ssm_a"].exp(),
        skip=vectors["ssm_d"],
        dt_bias=vectors["ssm_dt_bias"],
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
    """Rows of z, x, B, C and dt, in the order in which the input projection is stored."""
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
    """As the projection's outputs, each part's multiplier (falcon_h1/modeling_falcon_h1.py:948)."""
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


def _per_head(build: Build, index: int, parameter: str, heads: Mamba2Heads) -> torch.Tensor:
    """[H] of a vector with an element per head, rounded to the model's dtype as it is elsewhere; float32."""
    assert build.config.mamba2 is not None
    (rows,) = head_rows(heads.ids, 1)
    return build.pieces.rows(build.name(index, parameter), (build.config.mamba2.num_heads,), rows).float()


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
