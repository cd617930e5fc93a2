"""transformers' cache of a text, by the names and in the order of rayk's page fields.

Every field is a tensor [units, rows, elements]. Rows are the T tokens of a cache with an entry per token; a
recurrent state has one row, after the last token.

 k, v                        [KV heads, T, head size], keys after RoPE
 latent, rope                [1, T, elements], the latent after its norm, the shared key after RoPE
 conv_x, conv_b, conv_c      [heads or groups, 1, channels x taps], oldest tap first
 conv_q, conv_k, conv_v      the same per key and per value head
 ssm                         [heads, 1, head size x state size]
 delta                       [value heads, 1, key head size x value head size]

If each channel has its own state (Mamba1), a unit is a run of channels.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from torch import Tensor

from rayk.oracle.text import RECURRENT_TYPES

Fields = dict[str, Tensor]

_CHANNELS_PER_UNIT = 16
"""Channels per unit of Mamba1, where they divide the channels."""


def layer_caches(config: Any, cache: Any) -> list[Fields]:
    """Return what `cache` holds of a single text, per layer; empty for layers that store nothing.

    config: transformers' config object. cache: its DynamicCache, fed with one text.
    """
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    # Sharing layers at the end keep nothing: the cache may end before them.
    num_kept = len(cache.layers)
    found = [_fields(config, kind, layer) for kind, layer in zip(types[:num_kept], cache.layers, strict=True)]
    return found + [{}] * (len(types) - num_kept)


def _fields(config: Any, kind: str, layer: Any) -> Fields:
    found: Fields = {}
    if getattr(layer, "keys", None) is not None:
        names = ("latent", "rope") if hasattr(config, "kv_lora_rank") else ("k", "v")
        found |= dict(zip(names, (layer.keys[0], layer.values[0]), strict=True))
    if kind in RECURRENT_TYPES:
        # The cache holds one tap more than the next token reads.
        taps, state = layer.conv_states[0][0, :, 1:], layer.recurrent_states[0][0]
        found |= _recurrent(config, taps, state)
    return found


def _recurrent(config: Any, taps: Tensor, state: Tensor) -> Fields:
    """Split taps [channels, width - 1], and states [channels, state size] (Mamba1) or [heads, ., .]."""
    if config.model_type == "qwen3_next":
        keys = config.linear_num_key_heads
        key_channels = keys * config.linear_key_head_dim
        parts = {"conv_q": (key_channels, keys), "conv_k": (key_channels, keys)}
        return _by_units(taps, parts, "conv_v", len(state)) | {"delta": state.flatten(1)[:, None]}
    if state.dim() == 2:
        units = len(state) // gcd(len(state), _CHANNELS_PER_UNIT)
        return {"conv_x": taps.reshape(units, 1, -1), "ssm": state.reshape(units, 1, -1)}
    heads, head_size, state_size = state.shape
    groups = (len(taps) - heads * head_size) // (2 * state_size)
    parts = {"conv_x": (heads * head_size, heads), "conv_b": (groups * state_size, groups)}
    return _by_units(taps, parts, "conv_c", groups) | {"ssm": state.flatten(1)[:, None]}


def _by_units(taps: Tensor, parts: dict[str, tuple[int, int]], last: str, last_units: int) -> Fields:
    """Cut [channels, width - 1] into `parts` (channels, units) in order; the rest is `last`."""
    found, start = {}, 0
    for name, (channels, units) in parts.items():
        found[name] = taps[start : start + channels].reshape(units, 1, -1)
        start += channels
    return found | {last: taps[start:].reshape(last_units, 1, -1)}
