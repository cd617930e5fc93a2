"""Multi-head latent attention: all heads read one latent vector and one rotated key per token.

A head's key and value are linear maps of the latent (deepseek_v3/modeling_deepseek_v3.py:349), so neither is
computed: queries are mapped into the latent space and attend to the cached latents there, and the weighted
latents are mapped to values.

Shapes: T packed tokens, Q query heads of the rank, R latent, N and P the parts of a head's query and key
without and with positions, V value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rayk.attention.backend import AttentionBackend, MlaParams
from rayk.kernels.quantise import QuantisedKV
from rayk.kv.caches import CacheView, FieldView
from rayk.kv.formats import LATENT_SIDES
from rayk.models.build import Build
from rayk.models.config import MlaConfig, NormConfig
from rayk.models.layers.attention import checked_cache
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.models.layers.rope import Rotation, rotate_into_halves
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedQuery:
    """hidden -> a smaller, normed query; whole on every rank."""

    down: Linear
    norm: Norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, query rank]."""
        return self.norm.forward(self.down.forward(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaWeights:
    """One rank's weights: the latent's projections are whole, all others hold the rank's heads."""

    compressed: CompressedQuery | None
    """None: `query` takes hidden states."""
    query: Linear
    """-> [T, Q * (N + P)]"""
    latent: Linear
    """hidden -> [T, R + P]: the latent, then the shared key."""
    latent_norm: Norm
    key: torch.Tensor
    """[Q, N, R]: latent -> a head's key, applied to queries from the left."""
    value: torch.Tensor
    """[Q, R, V]"""
    out: RowParallelLinear
    """[T, Q * V] -> hidden"""


class Mla:
    """One rank's heads of one layer. Every rank caches the same latents."""

    def __init__(
        self,
        *,
        layer: int,
        weights: MlaWeights,
        params: MlaParams,
        backend: AttentionBackend,
        kv_scale: float = 1.0,
    ) -> None:
        """`kv_scale`: scale of latents and rotated keys, if the cache's format has one."""
        self.layer = layer
        self.num_query_heads, self.nope_size, latent_size = weights.key.shape
        assert latent_size == params.latent_size, (latent_size, params)
        self.window: int | None = None
        self.params = params
        self.backend = backend
        self.kv_scale = kv_scale
        self.kv_cache: torch.Tensor | QuantisedKV | None = None
        """[B, N, R + P]: the latent of a token slot, then its key; or a quantised format."""
        self._weights = weights

    def bind_kv_cache(self, view: CacheView) -> None:
        """Use `view` [B, 1, N, R + P] from now on; its head axis is dropped, unless it is quantised."""
        sizes = self.params.latent_size, self.params.rope_size
        cache = checked_cache(view, 1, sizes, (self.kv_scale, self.kv_scale), LATENT_SIDES)
        self.kv_cache = cache if isinstance(cache, QuantisedKV) else cache.squeeze(1)

    def unbind_kv_cache(self) -> None:
        self.kv_cache = None

    def field_views(self) -> tuple[FieldView, ...]:
        """latent and rope [B, 1, N, size] of the bound cache, or all stored fields of a quantised one; every
        rank holds the one unit."""
        assert self.kv_cache is not None, f"layer {self.layer}: no KV cache is bound"
        if isinstance(self.kv_cache, QuantisedKV):
            return tuple(FieldView(name, view, (0,)) for name, view in self.kv_cache.fields().items())
        cache, size = self.kv_cache.unsqueeze(1), self.params.latent_size
        return FieldView("latent", cache[..., :size], (0,)), FieldView("rope", cache[..., size:], (0,))

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; stores the T tokens' latents. `metadata` is the backend's."""
        assert self.kv_cache is not None, f"layer {self.layer}: no KV cache is bound"
        rotation = places.rotation
        assert rotation is not None, f"layer {self.layer}: latent attention has positions"
        w, latent_size = self._weights, self.params.latent_size
        q = w.query.forward(x if w.compressed is None else w.compressed.forward(x))
        q = q.view(len(x), self.num_query_heads, -1)
        cached = w.latent.forward(x)
        latent = w.latent_norm.forward(cached[:, :latent_size])
        key = rotate_into_halves(cached[:, None, latent_size:], rotation)
        out = self.backend.forward_latent(
            self._into_latents(q, rotation),
            latent,
            key.squeeze(1),
            self.kv_cache,
            metadata,
            self.params,
        )
        return w.out.forward(torch.einsum("tqr,qrv->tqv", out, w.value).flatten(1))

    def _into_latents(self, q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Map the first part of queries [T, Q, N + P] into the latent space, and turn the rest:
        [T, Q, R + P]."""
        latent_size = self.params.latent_size
        out = q.new_empty(*q.shape[:2], latent_size + self.params.rope_size)
        parts = (q[..., : self.nope_size], out[..., :latent_size])
        torch.bmm(parts[0].transpose(0, 1), self._weights.key, out=parts[1].transpose(0, 1))
        rotate_into_halves(q[..., self.nope_size :], rotation, out=out[..., latent_size:])
        return out


def build_mla(build: Build, index: int) -> Mla:
    config, mla = build.config, build.config.mla
    assert mla is not None
    heads = shard.query_heads(config.num_query_heads, *build.tp)
    cached = mla.latent_size + mla.rope_size
    # Per head, the maps from the latent to a key and to a value, stacked. They are dequantised even where the
    # release has them in fp8: queries and weighted latents are multiplied by them, head by head and from the
    # other side for keys, which are not the inputs that the release's scales of inputs are for.
    size = mla.nope_size + mla.value_size
    rows = (Rows("kv_up", config.num_query_heads * size, head_rows(heads, size)),)
    build.pieces.leave(build.name(index, "kv_up.weight"))
    maps = build.pieces.stacked(index, rows, "weight", (mla.latent_size,))
    maps = maps.view(len(heads), size, mla.latent_size)
    compressed, query = _query(build, index, mla, heads)
    weights = MlaWeights(
        compressed=compressed,
        query=query,
        latent=build.linear(index, (Rows.whole("kv_down", cached),), bias=mla.bias),
        latent_norm=build.norm(
            build.name(index, "kv_norm.weight"), mla.latent_size, NormConfig(eps=mla.norm_eps)
        ),
        key=maps[:, : mla.nope_size],
        value=maps[:, mla.nope_size :].mT,
        out=build.row_parallel(
            index,
            Rows("o", config.num_query_heads * mla.value_size, head_rows(heads, mla.value_size)),
            bias=mla.bias,
        ),
    )
    params = MlaParams(scale=mla.scale, latent_size=mla.latent_size, rope_size=mla.rope_size)
    # As in vLLM, the key's scale is the latent's, and the value's is unused.
    kv_scale, _ = build.kv_scales(index)
    return Mla(
        layer=index,
        weights=weights,
        params=params,
        backend=build.backend_for(index),
        kv_scale=kv_scale,
    )


def _query(
    build: Build, index: int, mla: MlaConfig, heads: tuple[int, ...]
) -> tuple[CompressedQuery | None, Linear]:
    size, total = mla.nope_size + mla.rope_size, build.config.num_query_heads
    rows = head_rows(heads, size)
    if mla.query_rank is None:
        return None, build.linear(index, (Rows("q", total * size, rows),), bias=False)
    down = (Rows.whole("q_down", mla.query_rank),)
    compressed = CompressedQuery(
        down=build.linear(index, down, bias=mla.bias),
        norm=build.norm(build.name(index, "q_norm.weight"), mla.query_rank, NormConfig(eps=mla.norm_eps)),
    )
    up = (Rows("q_up", total * size, rows),)
    return compressed, build.linear(index, up, bias=False, num_inputs=mla.query_rank)
