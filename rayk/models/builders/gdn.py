"""Building gated delta nets: value heads are divided, each rank holds the key heads they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rayk.models.config import GdnConfig, NormConfig
from rayk.models.layers.gdn import GatedDeltaNet, GdnHeads, GdnWeights
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build


def build_gdn(build: Build, index: int) -> GatedDeltaNet:
    """The rank's heads of layer `index`."""
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
    decay, dt_bias = (_per_head(build, index, name, heads.value) for name in ("A_log", "dt_bias"))
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
    """Rows of each of `heads`, of `size` rows each, from row `start`."""
    return tuple(range(start + head * size, start + (head + 1) * size) for head in heads)


def _input_rows(config: GdnConfig, heads: GdnHeads) -> tuple[Rows, Rows]:
    """Rows of q, k, v and z, then of b and a.

    On disk the two matrices are grouped by key head: q, k, and the v and z of its value heads; b and a of
    its value heads (qwen3_next/modeling_qwen3_next.py:628).
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
    """[channels of q, k and v, taps]; on disk all of q, then of k, then of v, [channels, 1, taps]."""
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


def _per_head(build: Build, index: int, parameter: str, heads: tuple[int, ...]) -> torch.Tensor:
    """Rounded to the model's dtype, as its other weights are; float32 for the kernels."""
    held = range(heads[0], heads[-1] + 1)
    assert len(held) == len(heads), "a rank's value heads follow each other"
    name = build.name(index, f"gdn_{parameter}")
    assert build.config.gdn is not None
    return build.pieces.rows(name, (build.config.gdn.num_value_heads,), held).float()
