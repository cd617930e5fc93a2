"""Building multi-head latent attention: query heads are divided, what makes the latent is on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.attention.backend import MlaParams
from rayk.models.config import MlaConfig, NormConfig
from rayk.models.layers.mla import CompressedQuery, Mla, MlaWeights
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.layers.linear import Linear


def build_mla(build: Build, index: int) -> Mla:
    """The rank's heads of layer `index`."""
    config, mla = build.config, build.config.mla
    assert mla is not None
    heads = shard.query_heads(config.num_query_heads, *build.tp)
    cached = mla.latent_size + mla.rope_size
    # Per head, the maps from the latent to a key and to a value, one under the other.
    size = mla.nope_size + mla.value_size
    rows = (Rows("kv_up", config.num_query_heads * size, head_rows(heads, size)),)
    maps = build.pieces.stacked(index, rows, "weight", (mla.latent_size,))
    maps = maps.view(len(heads), size, mla.latent_size)
    compressed, query = _query(build, index, mla, heads)
    weights = MlaWeights(
        compressed=compressed,
        query=query,
        latent=build.linear(index, (Rows("kv_down", cached, (range(cached),)),), bias=mla.bias),
        latent_norm=build.norm(build.name(index, "kv_norm.weight"), mla.latent_size, _norm(mla)),
        key=maps[:, : mla.nope_size],
        value=maps[:, mla.nope_size :].mT,
        out=build.row_parallel(
            index,
            Rows("o", config.num_query_heads * mla.value_size, head_rows(heads, mla.value_size)),
            bias=mla.bias,
        ),
    )
    params = MlaParams(scale=mla.scale, latent_size=mla.latent_size, rope_size=mla.rope_size)
    # A latent is neither key nor value: the key's scale is its own, as in vLLM, and the value's unused.
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
    down = (Rows("q_down", mla.query_rank, (range(mla.query_rank),)),)
    compressed = CompressedQuery(
        down=build.linear(index, down, bias=mla.bias),
        norm=build.norm(build.name(index, "q_norm.weight"), mla.query_rank, _norm(mla)),
    )
    up = (Rows("q_up", total * size, rows),)
    return compressed, build.linear(index, up, bias=False, num_inputs=mla.query_rank)


def _norm(mla: MlaConfig) -> NormConfig:
    return NormConfig(eps=mla.norm_eps)
