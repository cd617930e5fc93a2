"""Gated delta nets: a matrix per value head that decays and is corrected towards each token's value
(qwen3_next/modeling_qwen3_next.py:582).

Shapes: T packed tokens, B state slots, Hk key heads and Hv value heads of the rank, Dk and Dv their sizes, W
taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.gated_delta_rule import gated_delta_rule
from rayk.kernels.segments import Segments
from rayk.models.build import Build
from rayk.models.config import GdnConfig, NormConfig
from rayk.models.layers.causal_conv import CausalConv, ConvPart
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.models.layers.state import StateMixer
from rayk.models.pieces import Rows
from rayk.parallel import shard


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnHeads:
    """The rank's heads: value heads are divided, and each rank holds the key heads they read (global ids)."""

    key: tuple[int, ...]
    value: tuple[int, ...]
    key_size: int
    value_size: int
    key_index: torch.Tensor
    """[Hv] int64, on the layer's device: the local key head of each local value head."""

    @property
    def parts(self) -> tuple[ConvPart, ConvPart, ConvPart]:
        return (
            ConvPart("conv_q", self.key, self.key_size),
            ConvPart("conv_k", self.key, self.key_size),
            ConvPart("conv_v", self.value, self.value_size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnWeights:
    inputs: Linear
    """hidden -> q, k, v, z of the heads, then b and a, one of each per value head."""
    conv: torch.Tensor
    """[channels of q, k and v, W]"""
    decay: torch.Tensor
    """[Hv] float32: -exp(A_log)."""
    dt_bias: torch.Tensor
    """[Hv] float32"""
    norm: Norm
    """The norm of each value head's output, before the gate."""
    out: RowParallelLinear
    """[T, Hv * Dv] -> hidden"""


class GatedDeltaNet(StateMixer):
    """One rank's heads of one layer."""

    def __init__(self, *, layer: int, heads: GdnHeads, weights: GdnWeights) -> None:
        conv = CausalConv(weights.conv, None, heads.parts)
        shape = (heads.key_size, heads.value_size)
        super().__init__(layer=layer, conv=conv, field="delta", units=heads.value, shape=shape)
        self.heads = heads
        self._weights = weights

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the step's Segments; positions are not used."""
        state = self._bound()
        segments: Segments = metadata
        w, heads = self._weights, self.heads
        keys, values = len(heads.key) * heads.key_size, len(heads.value) * heads.value_size
        sizes = [2 * keys + values, values, len(heads.value), len(heads.value)]
        qkv, z, b, a = torch.split(w.inputs.forward(x), sizes, dim=-1)
        q, k, v = torch.split(self._conv.forward(qkv, segments), [keys, keys, values], dim=-1)
        out = gated_delta_rule(
            q.view(len(x), -1, heads.key_size),
            k.view(len(x), -1, heads.key_size),
            v.view(len(x), -1, heads.value_size),
            w.decay * F.softplus(a + w.dt_bias),
            b.sigmoid().float(),
            heads.key_index,
            state,
            segments,
            scale=heads.key_size**-0.5,
        )
        return w.out.forward(w.norm.gated(out, z))


def build_gdn(build: Build, index: int) -> GatedDeltaNet:
    config = build.config.gdn
    assert config is not None
    counts = (config.num_value_heads, config.num_key_heads)
    heads = GdnHeads(
        key=shard.kv_heads(*counts, *build.tp, "value heads"),
        value=shard.query_heads(config.num_value_heads, *build.tp, "value heads"),
        key_size=config.key_head_size,
        value_size=config.value_head_size,
        key_index=torch.tensor(
            shard.kv_index(*counts, *build.tp), dtype=torch.int64, device=build.pieces.device
        ),
    )
    values = config.num_value_heads * config.value_head_size
    decay, dt_bias = (
        build.per_head(index, name, config.num_value_heads, heads.value)
        for name in ("gdn_A_log", "gdn_dt_bias")
    )
    weights = GdnWeights(
        inputs=build.linear(index, _input_rows(config, heads), bias=False),
        conv=_conv(build, index, config, heads),
        decay=-decay.exp(),
        dt_bias=dt_bias,
        norm=build.norm(
            build.name(index, "gdn_norm.weight"), config.value_head_size, NormConfig(eps=config.norm_eps)
        ),
        out=build.row_parallel(
            index, Rows("gdn_out", values, _spans(heads.value, config.value_head_size)), bias=False
        ),
    )
    return GatedDeltaNet(layer=index, heads=heads, weights=weights)


def _spans(heads: Sequence[int], size: int, start: int = 0) -> tuple[range, ...]:
    """List rows of each of `heads`, `size` rows each, from row `start`."""
    return tuple(range(start + head * size, start + (head + 1) * size) for head in heads)


def _input_rows(config: GdnConfig, heads: GdnHeads) -> tuple[Rows, Rows]:
    """List rows of q, k, v and z, then of b and a.

    On disk the two matrices are grouped by key head: q, k, and the v and z of its value heads; b and a of its
    value heads (qwen3_next/modeling_qwen3_next.py:628).
    """
    per_key = config.num_value_heads // config.num_key_heads
    dk, dv = config.key_head_size, config.value_head_size
    group = 2 * dk + 2 * per_key * dv
    queries = [span for g in heads.key for span in _spans((0,), dk, g * group)]
    keys = [span for g in heads.key for span in _spans((1,), dk, g * group)]
    v: list[range] = []
    z: list[range] = []
    b: list[range] = []
    a: list[range] = []
    for head in heads.value:
        g, member = divmod(head, per_key)
        v += _spans((member,), dv, g * group + 2 * dk)
        z += _spans((per_key + member,), dv, g * group + 2 * dk)
        b += _spans((member,), 1, g * 2 * per_key)
        a += _spans((per_key + member,), 1, g * 2 * per_key)
    return (
        Rows("gdn_qkvz", config.num_key_heads * group, (*queries, *keys, *v, *z)),
        Rows("gdn_ba", config.num_key_heads * 2 * per_key, (*b, *a)),
    )


def _conv(build: Build, index: int, config: GdnConfig, heads: GdnHeads) -> torch.Tensor:
    """Read [channels of q, k and v, taps]; on disk all of q, then of k, then of v, [channels, 1, taps]."""
    keys, values = (
        config.num_key_heads * config.key_head_size,
        config.num_value_heads * config.value_head_size,
    )
    rows = (
        *_spans(heads.key, config.key_head_size),
        *_spans(heads.key, config.key_head_size, keys),
        *_spans(heads.value, config.value_head_size, 2 * keys),
    )
    part = Rows("gdn_conv", 2 * keys + values, rows)
    return build.pieces.stacked(index, (part,), "weight", (1, config.conv_width)).squeeze(1)
