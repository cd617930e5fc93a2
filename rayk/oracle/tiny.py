"""Config classes and debug dimensions of the families that can be written (see also hybrids.py).

They are small enough for seconds on one CPU core and awkward enough to show mistakes: 2 KV heads (replicated
at TP 4), MLP and vocabulary sizes that TP 4 splits unevenly, head sizes other than hidden / heads, a sliding
window that is no multiple of a block and is crossed during decode.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from rayk.oracle.hybrids import FAMILIES as HYBRIDS
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
        # Layer 2 sees everything and has no positions; layers 1 and 3 have experts, which go unevenly to 2
        # and to 4 ranks. Queries grow within the first chunk.
        "llama4": _COMMON
        | {
            "intermediate_size": 54,
            "intermediate_size_mlp": 174,
            "head_dim": 16,
            "attention_chunk_size": 64,
            "no_rope_layer_interval": 3,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "floor_scale": 50,
            "attn_scale": 0.6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
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
        # Layer 2 is dense. 5 experts go unevenly to 2 and to 4 ranks; transformers wants sizes in 16 bytes.
        "qwen3_moe": _COMMON
        | {
            "head_dim": 16,
            "mlp_only_layers": [2],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 56,
            "norm_topk_prob": True,
        },
        # Attention scores are capped low enough to bend.
        "gemma2": _COMMON
        | {
            "hidden_size": 96,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 20.0,
            "sliding_window": 51,
            "tie_word_embeddings": True,
        },
        # The embedding scale, the root of the hidden size, is not representable in bfloat16.
        "gemma3": _COMMON
        | {
            "hidden_size": 96,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "sliding_window": 53,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
            },
        },
        # Layers 4 and 5 share. The last 100 tokens of the vocabulary have no inputs of their own.
        "gemma3n": _COMMON
        | {
            "vocab_size_per_layer_input": 415,
            "hidden_size": 96,
            "hidden_size_per_layer_input": 24,
            "intermediate_size": [174, 150, 174, 131, 90, 110],
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 47,
            "head_dim": 16,
            "laurel_rank": 14,
            "activation_sparsity_pattern": [0.7, 0.5, 0.3, 0.0, 0.0, 0.0],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            },
        },
        # 5 experts go unevenly to 2 and to 4 ranks. The limit is low enough to clamp.
        "gpt_oss": _COMMON
        | {
            "intermediate_size": 56,
            "head_dim": 16,
            "sliding_window": 45,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
        # hidden / heads = 24, of which 18 rotate.
        "phi3": _COMMON
        | {
            "hidden_size": 192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.35, 1.5, 1.7, 1.9, 2.2, 2.5],
                "long_factor": [1.0, 1.3, 1.8, 2.6, 3.8, 5.5, 8.0, 12.0, 18.0],
            },
        },
        # hidden / heads = 16. Every third layer is full and has no positions.
        "cohere2": _COMMON
        | {
            "hidden_size": 128,
            "sliding_window": 43,
            "sliding_window_pattern": 3,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
        **HYBRIDS,
    }
)
"""family -> values of its config class."""

HYBRID: Mapping[str, Any] = MappingProxyType(
    {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
)
"""Overrides that make qwen2 or qwen3 hybrid: full attention in layers 0 and 1, sliding above."""

MTP_KEY = "num_nextn_predict_layers"
"""config.json's number of multi-token prediction layers."""
MTP_FAMILIES = ("deepseek_v3", "qwen3_next")
"""Families that may have them (oracle.mtp)."""

ADDS_BOS = frozenset({"cohere2", "gemma2", "gemma3", "gemma3n", "llama", "mistral"})
"""Families whose tokenizers prepend the BOS token by default."""

_OLD_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"})
_OTHER_OLD_KEYS = frozenset({"sliding_window_pattern"})
_SHARING_KEYS = frozenset({"num_kv_shared_layers", "kv_sharing_targets"})
"""rayk's own keys, for families whose layers all attend and that have no sharing (oracle.sharing)."""


def family_values(family: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `overrides` over a family's config values. Raises UnsupportedArchitecture for an unknown family."""
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


def model_type(family: str) -> str:
    """transformers' name of a family, or of its text model if it has a separate one."""
    from transformers import CONFIG_MAPPING

    return f"{family}_text" if f"{family}_text" in CONFIG_MAPPING else family


def make_config(family: str, values: Mapping[str, Any]) -> Any:
    """transformers' config object. Raises UserError for a key that its class does not have."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type(family)]
    # Qwen3MoeConfig lists no head_dim, which its attention reads, and keeps num_experts under another name.
    known = {*config_class().to_dict(), *FAMILIES[family], *_OLD_ROPE_KEYS, *_OTHER_OLD_KEYS}
    if family not in HYBRIDS and not known & _SHARING_KEYS:
        known |= _SHARING_KEYS
    if family in MTP_FAMILIES:
        known.add(MTP_KEY)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise UserError(
                f"unknown config key {key!r}",
                where=config_class.__name__,
                mend=f"did you mean {near[0]!r}?" if near else "see the family's config.json",
            )
    # Config classes complete the mappings they are given.
    return config_class(**deepcopy(dict(values)))
