"""Rope settings of a config.json, in the new and the older form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rayk.models.config import RopeConfig
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def parse_rope(
    raw: RawConfig,
    head_size: int,
    *,
    values: object = None,
    theta: float = 10000.0,
    partial: bool = False,
) -> RopeConfig:
    """Parse `rope_parameters`, or the older `rope_theta` and `rope_scaling`, or `values` if given.

    `theta` is the family's default; `partial` says whether `partial_rotary_factor` is allowed. Raises
    UnsupportedArchitecture for a kind that is not implemented.
    """
    found = raw.get("rope_parameters", raw.get("rope_scaling", {})) if values is None else values
    if not isinstance(found, dict):
        raise CheckpointError(f"rope settings must be an object: {found!r}", where=raw.where)
    rope = replace(raw, values=found, where=f"{raw.where}: rope")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise raw.refuse(f"rope type {kind!r} is not supported", "one of " + ", ".join(ROPE_KINDS))
    if any(isinstance(value, dict) for value in found.values()):
        raise raw.refuse("rope settings per layer type are not supported in this family")
    rotary_size = _rotary_size(raw, rope, head_size, partial=partial)
    if values is None:
        theta = raw.number("rope_theta", theta)
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", theta),
        rotary_size=rotary_size,
        **_SCALING[kind](raw, rope, rotary_size),
    )


def original_positions(raw: RawConfig, rope: RawConfig) -> int:
    """Read the positions before the extension. The model's own key wins, as in transformers."""
    for settings in (raw, rope):
        if settings.get("original_max_position_embeddings") is not None:
            return settings.count("original_max_position_embeddings")
    return raw.count("max_position_embeddings")


def _rotary_size(raw: RawConfig, rope: RawConfig, head_size: int, *, partial: bool) -> int:
    share = rope.number("partial_rotary_factor", raw.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise raw.refuse("`partial_rotary_factor` other than 1 is not supported in this family")
    size = int(head_size * share)
    if size % 2 or not 0 < size <= head_size:
        raise CheckpointError(
            f"{size} of `head_dim` {head_size} cannot rotate: an even number of dimensions can",
            where=raw.where,
        )
    return size


def _llama3(raw: RawConfig, rope: RawConfig, rotary_size: int) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"),
        "low_freq_factor": rope.number("low_freq_factor"),
        "high_freq_factor": rope.number("high_freq_factor"),
        "original_max_positions": original_positions(raw, rope),
    }


def _yarn(raw: RawConfig, rope: RawConfig, rotary_size: int) -> dict[str, Any]:
    """Parse settings of YaRN (transformers/modeling_rope_utils.py:346)."""
    original = original_positions(raw, rope)
    stretch = raw.count("max_position_embeddings") / original
    factor = rope.number("factor", stretch if stretch > 1 else None)
    return {
        "factor": factor,
        "original_max_positions": original,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", default=True),
        "attention_factor": rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
    }


def _yarn_attention_factor(rope: RawConfig, factor: float) -> float:
    """0.1 ln(factor) + 1, or the ratio of its mscale and mscale_all_dim versions if both are set."""
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_growth(factor, rope.number("mscale")) / yarn_growth(factor, rope.number("mscale_all_dim"))
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, mscale: float) -> float:
    """Return the square root of the growth that yarn allows scores at this factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(raw: RawConfig, rope: RawConfig, rotary_size: int) -> dict[str, Any]:
    """Read settings for sequences within the original positions (transformers/modeling_rope_utils.py:487)."""
    original = original_positions(raw, rope)
    factor = rope.number("factor", raw.count("max_position_embeddings") / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rotary_size // 2:
        raise CheckpointError(f"`short_factor` must list {rotary_size // 2} numbers", where=rope.where)
    if not all(isinstance(f, int | float) and not isinstance(f, bool) and f > 0 for f in factors):
        raise CheckpointError("`short_factor` must list positive numbers", where=rope.where)
    return {
        "original_max_positions": original,
        "attention_factor": rope.number("attention_factor", grown),
        "short_factors": tuple(float(f) for f in factors),
    }


_SCALING: dict[str, Callable[[RawConfig, RawConfig, int], dict[str, Any]]] = {
    "default": lambda raw, rope, rotary_size: {},
    "linear": lambda raw, rope, rotary_size: {"factor": rope.number("factor")},
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
