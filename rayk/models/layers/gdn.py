"""Gated delta nets: a matrix per value head that forgets, and is corrected towards each token's value.

What is computed: qwen3_next/modeling_qwen3_next.py:582.

Shapes: T packed tokens, B state slots, Hk key heads and Hv value heads of the rank, Dk and Dv their sizes,
W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.gated_delta_rule import gated_delta_rule
from rayk.kv.caches import FieldView
from rayk.models.layers.causal_conv import CausalConv, ConvPart

if TYPE_CHECKING:
    from rayk.kernels.segments import Segments
    from rayk.models.layers.linear import Linear, RowParallelLinear
    from rayk.models.layers.norm import Norm
    from rayk.models.layers.places import Places


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnHeads:
    """The rank's heads: value heads are divided, and each rank holds the key heads they read."""

    key: tuple[int, ...]
    """Global ids."""
    value: tuple[int, ...]
    key_size: int
    value_size: int
    key_index: torch.Tensor
    """[Hv] int64, on the layer's device: the local key head of each local value head."""

    @property
    def parts(self) -> tuple[ConvPart, ConvPart, ConvPart]:
        """What is convolved."""
        return (
            ConvPart("conv_q", self.key, self.key_size),
            ConvPart("conv_k", self.key, self.key_size),
            ConvPart("conv_v", self.value, self.value_size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnWeights:
    """One rank's weights."""

    inputs: Linear
    """hidden -> q, k, v, z of the heads, then b and a, one of each per value head."""
    conv: torch.Tensor
    """[channels of q, k and v, W]"""
    decay: torch.Tensor
    """[Hv] float32: -exp(A_log)."""
    dt_bias: torch.Tensor
    """[Hv] float32"""
    norm: Norm
    """Of each value head's output, before the gate."""
    out: RowParallelLinear
    """[T, Hv * Dv] -> hidden"""


class GatedDeltaNet:
    """One rank's heads of one layer. The state cache is bound by the engine before the first step."""

    def __init__(self, *, layer: int, heads: GdnHeads, weights: GdnWeights) -> None:
        self.layer = layer
        self.heads = heads
        self._weights = weights
        self._conv = CausalConv(weights.conv, None, heads.parts)
        self._delta: torch.Tensor | None = None

    def bind_kv_cache(self, view: Mapping[str, torch.Tensor]) -> None:
        """Use the bundles [B, units, 1, C] of conv_q, conv_k, conv_v and delta from now on."""
        heads, delta = self.heads, view["delta"]
        size = heads.key_size * heads.value_size
        assert delta.shape[1:] == (len(heads.value), 1, size), (delta.shape, heads)
        assert delta.dtype == torch.float32, delta.dtype
        self._conv.bind(view)
        self._delta = delta.view(*delta.shape[:2], heads.key_size, heads.value_size)

    def unbind_kv_cache(self) -> None:
        """Forget the cache, so that its buffer can be freed."""
        self._conv.unbind()
        self._delta = None

    def field_views(self) -> tuple[FieldView, ...]:
        """Taps [B, units, 1, D * (W - 1)] and states [B, Hv, 1, Dk * Dv] of the bound cache."""
        assert self._delta is not None, f"layer {self.layer}: no state cache is bound"
        delta = self._delta.view(*self._delta.shape[:2], 1, -1)
        return (*self._conv.field_views(), FieldView("delta", delta, self.heads.value))

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the step's Segments; positions do not enter."""
        assert self._delta is not None, f"layer {self.layer}: no state cache is bound"
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
            w.decay * F.softplus(a.float() + w.dt_bias),
            b.sigmoid().float(),
            heads.key_index,
            self._delta,
            segments,
            scale=heads.key_size**-0.5,
        )
        normed = w.norm.forward(out) * F.silu(z.float()).view_as(out)
        return w.out.forward(normed.to(x.dtype).flatten(1))
