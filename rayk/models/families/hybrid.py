"""Layer kinds, Mamba settings and weight names that families with recurrent layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rayk.models.config import DecoderConfig, LayerConfig, Mamba2Config
from rayk.models.families.raw import MAX_LAYERS, RawConfig
from rayk.types.errors import CheckpointError

SILU = ("silu", "swish")
"""Names of the only supported activation behind a convolution."""
RECURRENT, ATTENTION = "linear_attention", "full_attention"
_OLD_KINDS: Mapping[str, str] = MappingProxyType({"mamba": RECURRENT, "attention": ATTENTION})

DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "hidden_act": "silu",
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
    }
)
"""Defaults of configuration_{bamba,granitemoehybrid,falcon_h1}.py."""


def layer_kinds(raw: RawConfig, keys: Sequence[str], num_layers: int | None) -> tuple[str, ...] | None:
    """Return the list under the first of `keys` in config.json, in today's names; None if it has none.
    CheckpointError unless it has `num_layers` entries."""
    key = next((k for k in keys if raw.get(k) is not None), None)
    if key is None:
        return None
    kinds = raw.get(key)
    if (
        not isinstance(kinds, list)
        or not 0 < len(kinds) <= MAX_LAYERS
        or num_layers not in (None, len(kinds))
    ):
        raise CheckpointError(
            f"`{key}` must list {num_layers or 'the'} layers" + " (`num_hidden_layers`)" * bool(num_layers),
            where=raw.where,
        )
    return tuple(_OLD_KINDS.get(str(kind), str(kind)) for kind in kinds)


def require_kinds(raw: RawConfig, kinds: Sequence[str], known: Sequence[str]) -> None:
    """Raise UnsupportedArchitecture for a layer of another kind."""
    for i, kind in enumerate(kinds):
        if kind not in known:
            raise raw.refuse(f"layer {i} of kind {kind!r} is not supported in this family")


def with_mixers(config: DecoderConfig, mixers: Sequence[str]) -> tuple[LayerConfig, ...]:
    """Return the config's layers with these mixers; only attention keeps positions and window."""
    return tuple(
        layer if mixer == "attention" else replace(layer, mixer=mixer, rope=None, window=None)
        for layer, mixer in zip(config.layers, mixers, strict=True)
    )


def parse_mamba2(raw: RawConfig, *, inner: int, gate: str = "gate_norm", norm_eps: float) -> Mamba2Config:
    """Parse the `mamba_*` keys. `inner`: channels of all heads."""
    num_heads = raw.count("mamba_n_heads")
    head_size = inner // num_heads if raw.get("mamba_d_head") == "auto" else raw.count("mamba_d_head")
    if num_heads * head_size != inner:
        raise CheckpointError(
            f"`mamba_n_heads` {num_heads} x `mamba_d_head` {head_size} is not the inner width {inner}",
            where=raw.where,
        )
    refuse_time_steps(raw)
    raw.require("hidden_act", *SILU)
    bias = raw.flag("mamba_proj_bias")
    return Mamba2Config(
        num_heads=num_heads,
        head_size=head_size,
        num_groups=num_groups(raw, "mamba_n_groups", num_heads),
        state_size=raw.count("mamba_d_state"),
        conv_width=conv_width(raw, "mamba_d_conv"),
        conv_bias=raw.flag("mamba_conv_bias"),
        proj_bias=bias,
        out_bias=bias,
        gate=gate,
        norm_eps=norm_eps,
    )


def num_kv_heads(raw: RawConfig) -> int:
    """Return the families' default of 8; null means as many as query heads."""
    is_null = raw.values.get("num_key_value_heads", 8) is None
    return raw.count("num_attention_heads") if is_null else 8


def conv_width(raw: RawConfig, key: str) -> int:
    """Read the width of the convolution, at least 2."""
    width = raw.count(key)
    if width < 2:
        raise raw.refuse(f"`{key}` {width}: a convolution that sees one token is not supported")
    return width


def num_groups(raw: RawConfig, key: str, num_heads: int) -> int:
    """Read the number of groups of B and C, which must divide the heads."""
    groups = raw.count(key)
    if num_heads % groups:
        raise CheckpointError(
            f"`{key}` {groups} does not divide the {num_heads} Mamba heads", where=raw.where
        )
    return groups


def refuse_time_steps(raw: RawConfig) -> None:
    """Raise UnsupportedArchitecture for limits of dt. Infinity may be written as today's transformers does.

    transformers clamps dt in prefill but not in decode (mamba2/modeling_mamba2.py:279 and :195), so there is
    no right answer to compare with.
    """
    limits = raw.get("time_step_limit", [0.0, math.inf])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise CheckpointError(f"`time_step_limit` must list two numbers, not {limits!r}", where=raw.where)
    low, high = (value.get("__float__") if isinstance(value, dict) else value for value in limits)
    is_free = isinstance(low, int | float) and low <= 0 and high in (math.inf, "Infinity", "inf")
    if not is_free:
        raise raw.refuse(
            f"`time_step_limit` {limits!r} limits the time steps, which is not supported",
            "transformers itself limits them in prefill but not in decode",
        )


def mamba2_names(module: str) -> dict[str, str]:
    """Parameter -> name on disk of the mixer `module`, e.g. model.layers.{i}.mamba."""
    return {
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_dt_bias": f"{module}.dt_bias",
        "ssm_norm.weight": f"{module}.norm.weight",
        **_module_names(module, {"ssm_in": "in_proj", "ssm_conv": "conv1d", "ssm_out": "out_proj"}),
    }


def mamba1_names(module: str) -> dict[str, str]:
    modules = {
        "ssm_in": "in_proj",
        "ssm_conv": "conv1d",
        "ssm_selection": "x_proj",
        "ssm_dt": "dt_proj",
        "ssm_dt_norm": "dt_layernorm",
        "ssm_b_norm": "b_layernorm",
        "ssm_c_norm": "c_layernorm",
        "ssm_out": "out_proj",
    }
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", **_module_names(module, modules)}


def attention_names(module: str) -> dict[str, str]:
    return _module_names(module, {name: f"{name}_proj" for name in "qkvo"})


def mlp_names(module: str) -> dict[str, str]:
    return _module_names(module, {name: f"{name}_proj" for name in ("gate", "up", "down")})


def _module_names(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{ours}.{part}": f"{module}.{stored}.{part}"
        for ours, stored in names.items()
        for part in ("weight", "bias")
    }


HYBRID_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "input_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "mlp_norm.weight": "model.layers.{i}.pre_ff_layernorm.weight",
        **attention_names("model.layers.{i}.self_attn"),
        **mlp_names("model.layers.{i}.feed_forward"),
    }
)
"""Names of jamba, bamba and falcon_h1, whose mixers are model.layers.{i}.mamba."""
FINAL_NORM = "model.final_layernorm.weight"
