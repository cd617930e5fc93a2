"""Tiny models with several attention groups: chunked or sliding layers, layers that share keys and values.

gemma3n and llama4 in two shapes each; models of other families in which layers reuse others' keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rayk.oracle.tiny import (
    ALL_ROUTED,
    HYBRID,
    LAST_REUSE,
    OTHER_STREAMS,
    REUSE_IN_ORDER,
    TWICE_REUSED,
)

_ALTERNATING: Mapping[str, Any] = {**HYBRID, "layer_types": ["full_attention", "sliding_attention"] * 2}

GROUP_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gemma3n": ("gemma3n", {}),
        "gemma3n-other-streams": ("gemma3n", OTHER_STREAMS),
        "llama4": ("llama4", {}),
        "llama4-all-routed": ("llama4", ALL_ROUTED),
        "qwen2-reuse": ("qwen2", REUSE_IN_ORDER),
        "qwen3-hybrid-reuse": ("qwen3", {**_ALTERNATING, **LAST_REUSE}),
        "gemma3-reuse": ("gemma3", LAST_REUSE),
        "qwen3-twice-reused": ("qwen3", {**HYBRID, **TWICE_REUSED}),
    }
)
"""A name of our own -> family, overrides."""
