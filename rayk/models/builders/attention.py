"""Building attention: query heads are divided, each rank holds the KV heads they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayk.attention.backend import AttentionParams
from rayk.models.config import NormConfig
from rayk.models.layers.attention import Attention, AttentionMultipliers, AttentionWeights
from rayk.models.layers.norm import Norm
from rayk.models.pieces import Rows, head_rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import DecoderConfig


def build_attention(build: Build, index: int) -> Attention:
    """The rank's heads of layer `index`."""
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
        qkv=build.linear(index, parts, bias=config.qkv_bias),
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
        sinks=_sinks(build, index, q_heads) if config.sinks else None,
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


def _query_rows(num_heads: int, held: tuple[int, ...], size: int, *, gated: bool) -> Rows:
    """Rows of `q`, which holds, per head, q and then the gate where heads are `gated`; gates come first."""
    if not gated:
        return Rows("q", num_heads * size, head_rows(held, size))
    # In halves of a head: 2 h is the query of head h, 2 h + 1 its gate.
    halves = [2 * head + 1 for head in held] + [2 * head for head in held]
    return Rows("q", 2 * num_heads * size, head_rows(halves, size))


def _sinks(build: Build, index: int, q_heads: tuple[int, ...]) -> torch.Tensor:
    """Rounded to the model's dtype, as its other weights are; float32 for the kernels."""
    (rows,) = head_rows(q_heads, 1)
    name = build.name(index, "sinks")
    return build.pieces.rows(name, (build.config.num_query_heads,), rows).float()


def _turned_norm(config: DecoderConfig, index: int) -> Norm | None:
    if config.turned_norm_eps is None or config.layers[index].rope is None:
        return None
    return Norm(None, NormConfig(eps=config.turned_norm_eps))


def _qk_norm(build: Build, index: int, num_q: int, num_kv: int) -> Norm:
    """The head norms of q and k as one weight [Q + H, D]; of q alone where the layer makes no keys."""
    size = build.config.head_size_k
    weights = [build.pieces.whole(build.name(index, "q_norm.weight"), size).expand(num_q, size)]
    if num_kv:
        weights.append(build.pieces.whole(build.name(index, "k_norm.weight"), size).expand(num_kv, size))
    return Norm(torch.cat(weights), build.config.norm)
