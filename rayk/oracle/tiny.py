"""The families the checkpoint writer knows: config class by model_type, and debug dimensions.

Small enough for seconds on one CPU core, awkward enough to show mistakes: 2 KV heads (replicated at
TP 4), MLP and vocabulary sizes that TP 4 splits unevenly, head sizes other than hidden / heads, a
sliding window that is no multiple of a block and is crossed during decode.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rayk.types.errors import UnsupportedArchitecture, UserError

_COMMON: dict[str, Any] = {
    "vocab_size": 515,
    "hidden_size": 64,
    "intermediate_size": 174,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _COMMON
        | {
            "hidden_size": 128,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
        "mistral": _COMMON | {"hidden_size": 96, "head_dim": 16, "sliding_window": 50},
        # Qwen2's config has no head_dim: hidden / heads = 16.
        "qwen2": _COMMON | {"hidden_size": 128},
        "qwen3": _COMMON | {"head_dim": 16},
    }
)
"""family (transformers' model_type) -> values of its config class."""

HYBRID: Mapping[str, Any] = MappingProxyType(
    {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
)
"""Overrides that make qwen2 or qwen3 hybrid: full attention in layers 0 and 1, sliding above."""

ADDS_BOS = frozenset({"llama", "mistral"})
"""Families whose tokenizers put the BOS token before a text by default."""

_OLD_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling"})


def family_values(family: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config values to write: the family's, then `overrides`.

    Raises UnsupportedArchitecture for a family that is not in the table.
    """
    if family not in FAMILIES:
        known = tuple(sorted(FAMILIES))
        near = difflib.get_close_matches(family, known, n=1)
        raise UnsupportedArchitecture(
            f"no tiny checkpoint of family {family!r}",
            mend=(f"did you mean {near[0]!r}? " if near else "") + f"supported: {', '.join(known)}",
            architecture=family,
            supported=known,
        )
    values = dict(FAMILIES[family])
    if overrides.keys() & _OLD_ROPE_KEYS:
        values.pop("rope_parameters", None)
    return values | dict(overrides)


def make_config(family: str, values: Mapping[str, Any]) -> Any:
    """transformers' config object. Raises UserError for a key that its class does not have."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    known = set(config_class().to_dict()) | _OLD_ROPE_KEYS
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise UserError(
                f"unknown config key {key!r}",
                where=config_class.__name__,
                mend=f"did you mean {near[0]!r}?" if near else "see the family's config.json",
            )
    return config_class(**values)
