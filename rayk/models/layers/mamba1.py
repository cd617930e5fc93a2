"""Mamba1: a vector per channel, each element of which decays at its own rate (jamba/modeling_jamba.py:444).

Shapes: T packed tokens, B state slots, U runs of D channels of the rank, C = U * D, N the state's size, R the
rank of dt, W taps of the convolution. Channels are divided in runs, each a unit of the state cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rayk.kernels.segments import Segments
from rayk.kernels.selective_scan import selective_scan
from rayk.kv.specs import channels_per_unit
from rayk.models.build import Build
from rayk.models.config import Mamba1Config, NormConfig
from rayk.models.layers.causal_conv import CausalConv, ConvPart
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.models.layers.state import StateMixer
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Norms:
    dt: Norm
    b: Norm
    c: Norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Weights:
    """One rank's weights: channels are divided."""

    inputs: Linear
    """hidden -> x and z of the rank's channels."""
    conv: CausalConv
    selection: RowParallelLinear
    """[T, C] -> [T, R + 2 N], dt, B and C of all channels: summed over the ranks."""
    norms: Mamba1Norms | None
    dt: Linear
    """[T, R] -> [T, C], without its bias."""
    decay: torch.Tensor
    """[C, N] float32: -exp(A_log)."""
    skip: torch.Tensor
    """[C] float32: D."""
    dt_bias: torch.Tensor
    """[C] float32"""
    out: RowParallelLinear
    """[T, C] -> hidden"""


class Mamba1(StateMixer):
    """One rank's channels of one layer."""

    def __init__(self, *, layer: int, unit_ids: tuple[int, ...], weights: Mamba1Weights) -> None:
        """`unit_ids`: global ids of the rank's runs of channels, as the weights were cut."""
        num_channels, state_size = weights.decay.shape
        shape = (num_channels // len(unit_ids), state_size)
        super().__init__(layer=layer, conv=weights.conv, field="ssm", units=unit_ids, shape=shape)
        self._weights = weights

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the step's Segments; positions are not used."""
        state = self._bound()
        segments: Segments = metadata
        w = self._weights
        state_size = w.decay.shape[1]
        xs, z = w.inputs.forward(x).chunk(2, dim=-1)
        xs = w.conv.forward(xs, segments)
        selected = w.selection.forward(xs)
        dt, b, c = torch.split(selected, [selected.shape[1] - 2 * state_size, state_size, state_size], dim=-1)
        if w.norms is not None:
            dt, b, c = w.norms.dt.forward(dt), w.norms.b.forward(b), w.norms.c.forward(c)
        y = selective_scan(xs, w.dt.forward(dt), w.decay, b, c, w.skip, w.dt_bias, z, state, segments)
        return w.out.forward(y)


def build_mamba1(build: Build, index: int) -> Mamba1:
    config = build.config.mamba1
    assert config is not None
    unit_size = channels_per_unit(config.num_channels)
    units = shard.query_heads(config.num_channels // unit_size, *build.tp, f"runs of {unit_size} channels")
    (channels,) = head_rows(units, unit_size)

    def rows(parameter: str) -> Rows:
        return Rows(parameter, config.num_channels, (channels,))

    def cut(parameter: str, *rest: int) -> torch.Tensor:
        """Cut the rank's channels out of a tensor [channels, *rest], in the model's dtype."""
        return build.pieces.rows(build.name(index, parameter), (config.num_channels, *rest), channels)

    weights = Mamba1Weights(
        inputs=build.linear(index, (rows("ssm_in"),) * 2, bias=config.proj_bias),
        conv=CausalConv(
            cut("ssm_conv.weight", 1, config.conv_width).squeeze(1),
            cut("ssm_conv.bias") if config.conv_bias else None,
            (ConvPart("conv_x", units, unit_size),),
        ),
        selection=build.row_parallel(
            index,
            rows("ssm_selection"),
            bias=False,
            num_outputs=config.dt_rank + 2 * config.state_size,
            # The norms and the scan behind it need the whole sums.
            reduce=True,
        ),
        norms=_norms(build, index, config),
        dt=Linear(cut("ssm_dt.weight", config.dt_rank), None),
        decay=-cut("ssm_a", config.state_size).float().exp(),
        skip=cut("ssm_d").float(),
        dt_bias=cut("ssm_dt.bias").float(),
        out=build.row_parallel(index, rows("ssm_out"), bias=config.proj_bias),
    )
    return Mamba1(layer=index, unit_ids=units, weights=weights)


def _norms(build: Build, index: int, config: Mamba1Config) -> Mamba1Norms | None:
    if config.inner_norm_eps is None:
        return None
    norm = NormConfig(eps=config.inner_norm_eps)
    return Mamba1Norms(
        dt=build.norm(build.name(index, "ssm_dt_norm.weight"), config.dt_rank, norm),
        b=build.norm(build.name(index, "ssm_b_norm.weight"), config.state_size, norm),
        c=build.norm(build.name(index, "ssm_c_norm.weight"), config.state_size, norm),
    )
