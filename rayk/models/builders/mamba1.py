"""Building Mamba1 mixers: channels are divided in runs, each of which is a unit of the state cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kv.specs import channels_per_unit
from rayk.models.config import NormConfig
from rayk.models.layers.causal_conv import CausalConv, ConvPart
from rayk.models.layers.linear import Linear
from rayk.models.layers.mamba1 import Mamba1, Mamba1Norms, Mamba1Weights
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard

if TYPE_CHECKING:
    import torch

    from rayk.models.builders.context import Build
    from rayk.models.config import Mamba1Config


def build_mamba1(build: Build, index: int) -> Mamba1:
    """The rank's channels of layer `index`."""
    config = build.config.mamba1
    assert config is not None
    unit_size = channels_per_unit(config.num_channels)
    units = shard.query_heads(config.num_channels // unit_size, *build.tp, f"runs of {unit_size} channels")
    (channels,) = head_rows(units, unit_size)
    weights = Mamba1Weights(
        inputs=build.linear(index, (_rows("ssm_in", config, channels),) * 2, bias=config.proj_bias),
        conv=_conv(build, index, config, channels, ConvPart("conv_x", units, unit_size)),
        selection=build.row_parallel(
            index,
            _rows("ssm_selection", config, channels),
            bias=False,
            num_outputs=config.dt_rank + 2 * config.state_size,
            # The norms and the scan behind it need the whole sums.
            reduce=True,
        ),
        norms=_norms(build, index, config),
        dt=Linear(_cut(build, index, "ssm_dt.weight", config, channels, config.dt_rank), None),
        decay=-_cut(build, index, "ssm_a", config, channels, config.state_size).float().exp(),
        skip=_cut(build, index, "ssm_d", config, channels).float(),
        dt_bias=_cut(build, index, "ssm_dt.bias", config, channels).float(),
        out=build.row_parallel(index, _rows("ssm_out", config, channels), bias=config.proj_bias),
    )
    return Mamba1(layer=index, unit_ids=units, weights=weights)


def _rows(parameter: str, config: Mamba1Config, channels: range) -> Rows:
    return Rows(parameter, config.num_channels, (channels,))


def _cut(
    build: Build, index: int, parameter: str, config: Mamba1Config, channels: range, *rest: int
) -> torch.Tensor:
    """The rank's channels of a tensor [channels, *rest], in the model's dtype."""
    return build.pieces.rows(build.name(index, parameter), (config.num_channels, *rest), channels)


def _conv(build: Build, index: int, config: Mamba1Config, channels: range, part: ConvPart) -> CausalConv:
    weight = _cut(build, index, "ssm_conv.weight", config, channels, 1, config.conv_width)
    bias = _cut(build, index, "ssm_conv.bias", config, channels) if config.conv_bias else None
    return CausalConv(weight.squeeze(1), bias, (part,))


def _norms(build: Build, index: int, config: Mamba1Config) -> Mamba1Norms | None:
    if config.inner_norm_eps is None:
        return None
    norm = NormConfig(eps=config.inner_norm_eps)
    return Mamba1Norms(
        dt=build.norm(build.name(index, "ssm_dt_norm.weight"), config.dt_rank, norm),
        b=build.norm(build.name(index, "ssm_b_norm.weight"), config.state_size, norm),
        c=build.norm(build.name(index, "ssm_c_norm.weight"), config.state_size, norm),
    )
