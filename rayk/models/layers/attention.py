"""The attention mixer: projections, head norms and rotation around an attention backend.

Query heads are divided over the ranks, each of which holds the KV heads that its own read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayk.attention.backend import AttentionBackend, AttentionParams
from rayk.kernels.quantise import QuantisedKV, quantised_kv
from rayk.kv.caches import CacheView, FieldView
from rayk.models.build import Build
from rayk.models.config import DecoderConfig, NormConfig
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.models.layers.rope import rotate
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    qkv: Linear
    """Rows of the rank's gates if there are any (each of a query head's size), query heads, key heads and
    value heads; no key and value heads if the layer shares another's."""
    out: RowParallelLinear
    qk_norm: Norm | None
    """Weight [Q + H, D]: q's norm for every query head, then k's for every KV head that it computes."""
    turned_norm: Norm | None = None
    """Without weight, on the rotated heads of q and k."""
    v_norm: Norm | None = None
    """Without weight, on the heads of v."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMultipliers:
    """Factors besides the scale of scores (falcon_h1/modeling_falcon_h1.py:865)."""

    inputs: float = 1.0
    keys: float = 1.0
    """Applied before the rotation."""
    outputs: float = 1.0


class Attention:
    """One rank's heads of one layer. The engine binds the KV cache before the first step."""

    def __init__(
        self,
        *,
        layer: int,
        weights: AttentionWeights,
        kv_head_ids: tuple[int, ...],
        params: AttentionParams,
        backend: AttentionBackend,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        shares: bool = False,
        gated: bool = False,
        multipliers: AttentionMultipliers | None = None,
    ) -> None:
        """`kv_scales`: scales of keys and values, if the cache's format has them. `shares`: the layer binds
        another layer's cache and computes no keys and values. `gated`: a head's output is multiplied by the
        sigmoid of its gate."""
        self.layer = layer
        self.kv_head_ids = kv_head_ids
        """Global ids of the rank's KV heads in cache order, as the weights were cut."""
        self.num_query_heads = params.kv_index.shape[0]
        self.window = params.window
        self.params = params
        self.backend = backend
        self.shares = shares
        self.kv_scales = kv_scales
        self.kv_cache: torch.Tensor | QuantisedKV | None = None
        self._weights = weights
        self._gated = gated
        self._multipliers = multipliers or AttentionMultipliers()

    @property
    def key_norm_weight(self) -> torch.Tensor | None:
        """View of the head norm's weight of this rank's keys [H, D]; None if keys are not normed."""
        norm = self._weights.qk_norm
        if norm is None or norm.weight is None or self.shares:
            return None
        return norm.weight[self.num_query_heads :]

    def bind_kv_cache(self, view: CacheView) -> None:
        """Use `view` [B, H, N, C] from now on; C holds K then V of one head and token, or a quantised format,
        possibly in several bundles."""
        sizes = self.params.head_size_k, self.params.head_size_v
        self.kv_cache = checked_cache(view, len(self.kv_head_ids), sizes, self.kv_scales)

    def unbind_kv_cache(self) -> None:
        self.kv_cache = None

    def field_views(self) -> tuple[FieldView, ...]:
        """View k and v [B, H, N, D] of the bound cache, or all stored fields of a quantised one."""
        assert self.kv_cache is not None, f"layer {self.layer}: no KV cache is bound"
        if isinstance(self.kv_cache, QuantisedKV):
            fields = self.kv_cache.fields().items()
            return tuple(FieldView(name, view, self.kv_head_ids) for name, view in fields)
        size_k = self.params.head_size_k
        return (
            FieldView("k", self.kv_cache[..., :size_k], self.kv_head_ids),
            FieldView("v", self.kv_cache[..., size_k:], self.kv_head_ids),
        )

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; stores the tokens' k and v, if it computes any."""
        assert self.kv_cache is not None, f"layer {self.layer}: no KV cache is bound"
        num_q, num_kv = self.num_query_heads, 0 if self.shares else len(self.kv_head_ids)
        params, multipliers = self.params, self._multipliers
        qkv = self._weights.qkv.forward(x if multipliers.inputs == 1.0 else x * multipliers.inputs)
        gate = None
        if self._gated:
            gate, qkv = qkv.tensor_split((num_q * params.head_size_k,), dim=-1)
        num_qk = (num_q + num_kv) * params.head_size_k
        qk = qkv[:, :num_qk].view(-1, num_q + num_kv, params.head_size_k)
        v = None if self.shares else qkv[:, num_qk:].view(-1, num_kv, params.head_size_v)
        if v is not None and self._weights.v_norm is not None:
            v = self._weights.v_norm.forward(v)
        if multipliers.keys != 1.0:
            qk[:, num_q:] *= multipliers.keys
        norm, rotation = self._weights.qk_norm, places.rotation
        if norm is not None:
            qk = norm.forward(qk) if rotation is None else norm.rotated(qk, rotation)
        elif rotation is not None:
            qk = rotate(qk, rotation)
        if self._weights.turned_norm is not None:
            qk = self._weights.turned_norm.forward(qk)
        q, k = qk[:, :num_q], None if self.shares else qk[:, num_q:]
        if places.query_factors is not None:
            q = (q * places.query_factors).to(q.dtype)
        out = self.backend.forward(q, k, v, self.kv_cache, metadata, params).flatten(1)
        out = self._weights.out.forward(out if gate is None else out * gate.sigmoid())
        return out if multipliers.outputs == 1.0 else out * multipliers.outputs


def checked_cache(
    view: CacheView,
    num_heads: int,
    sizes: tuple[int, int],
    scales: tuple[float, float],
    sides: tuple[str, str] = ("k", "v"),
) -> torch.Tensor | QuantisedKV:
    """Return a bound view [B, H, N, C] as kernels take it, with its shape checked; arguments as in
    quantised_kv."""
    quantised = quantised_kv(view, *sizes, scales, sides)
    if quantised is not None:
        assert quantised.shape[1] == num_heads, (quantised.shape, num_heads)
        return quantised
    assert not isinstance(view, Mapping), f"{' and '.join(sides)} lie side by side"
    assert view.dim() == 4, view.shape
    assert (view.shape[1], view.shape[3]) == (num_heads, sum(sizes)), (view.shape, num_heads, sizes)
    assert view.stride(3) == 1, view.stride()
    return view


def build_attention(build: Build, index: int) -> Attention:
    config = build.config
    q_heads = shard.query_heads(config.num_query_heads, *build.tp)
    kv_heads = shard.kv_heads(config.num_query_heads, config.num_kv_heads, *build.tp)
    size_k, size_v = config.head_size_k, config.head_size_v
    shares = config.layers[index].kv_source is not None
    # A layer that shares still names all three: a fused tensor holds rows of each.
    made: tuple[int, ...] = () if shares else kv_heads
    parts = (
        _query_rows(config.num_query_heads, q_heads, size_k, gated=config.attention_gate),
        Rows("k", config.num_kv_heads * size_k, head_rows(made, size_k)),
        Rows("v", config.num_kv_heads * size_v, head_rows(made, size_v)),
    )
    out = Rows("o", config.num_query_heads * size_v, head_rows(q_heads, size_v))
    weights = AttentionWeights(
        qkv=build.linear(index, parts, bias=config.qkv_bias, num_inputs=build.attention_input_size),
        out=build.row_parallel(index, out, bias=config.o_bias),
        qk_norm=_qk_norm(build, index, len(q_heads), len(made)) if config.qk_norm else None,
        turned_norm=_turned_norm(config, index),
        v_norm=Norm(None, config.norm) if config.v_norm else None,
    )
    kv_index = shard.kv_index(config.num_query_heads, config.num_kv_heads, *build.tp)
    params = AttentionParams(
        scale=config.attention_scale,
        window=config.layers[index].window,
        chunk=config.layers[index].chunk,
        kv_index=torch.tensor(kv_index, dtype=torch.int64, device=build.pieces.device),
        head_size_k=size_k,
        head_size_v=size_v,
        sinks=build.per_head(index, "sinks", config.num_query_heads, q_heads) if config.sinks else None,
        soft_cap=config.attention_soft_cap,
    )
    return Attention(
        layer=index,
        weights=weights,
        kv_head_ids=kv_heads,
        params=params,
        backend=build.backend_for(index),
        kv_scales=build.kv_scales(index),
        shares=shares,
        gated=config.attention_gate,
        multipliers=AttentionMultipliers(
            inputs=config.attention_in_multiplier,
            keys=config.key_multiplier,
            outputs=config.attention_out_multiplier,
        ),
    )


def _query_rows(num_heads: int, own_heads: tuple[int, ...], size: int, *, gated: bool) -> Rows:
    """List rows of `q`; if heads are `gated`, each holds q then the gate, and gates come first in the
    result."""
    if not gated:
        return Rows("q", num_heads * size, head_rows(own_heads, size))
    # In units of half a head: 2 h is the query of head h, 2 h + 1 its gate.
    halves = [2 * head + 1 for head in own_heads] + [2 * head for head in own_heads]
    return Rows("q", 2 * num_heads * size, head_rows(halves, size))


def _turned_norm(config: DecoderConfig, index: int) -> Norm | None:
    if config.turned_norm_eps is None or config.layers[index].rope is None:
        return None
    return Norm(None, NormConfig(eps=config.turned_norm_eps))


def _qk_norm(build: Build, index: int, num_q: int, num_kv: int) -> Norm:
    """Return the head norms of q and k as one weight [Q + H, D]; of q alone if the layer computes no keys."""
    size = build.config.head_size_k
    of_query = build.pieces.whole(build.name(index, "q_norm.weight"), size)
    weights = of_query.new_empty(num_q + num_kv, size)  # torch.cat of meta tensors imports torch's compiler
    weights[:num_q] = of_query
    if num_kv:
        weights[num_q:] = build.pieces.whole(build.name(index, "k_norm.weight"), size)
    return Norm(weights, build.config.norm)
