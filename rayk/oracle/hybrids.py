"""Debug dimensions of families with recurrent states or latents; see tiny.py for the others.

Mamba heads, state sizes and group counts differ from attention's, so that confusing them shows; 2 groups (of
B and C) and 2 key heads are replicated at TP 4. Different kinds of layers come in different numbers.
`time_step_limit` stays infinite, since transformers clamps with it in prefill only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 515,
    "hidden_size": 64,
    "intermediate_size": 174,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

_CHUNK = 32
"""Tokens that transformers scans at once: its default costs time and changes nothing."""

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # hidden_size x expand = num_heads x head_dim. Its config class has no maximum of positions.
        "mamba2": {
            "vocab_size": 515,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "use_bias": True,
            "chunk_size": _CHUNK,
            "tie_word_embeddings": False,
        },
        # Attention in layers 1 and 4, experts in 1, 3 and 5: all four combinations. 192 channels and 12
        # query heads also allow TP 3, where one rank needs both KV heads.
        "jamba": _COMMON
        | {
            "hidden_size": 96,
            "intermediate_size": 110,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_expand": 2,
            "mamba_d_state": 8,
        },
        # hidden / heads = 16, of which 8 rotate.
        "bamba": _COMMON
        | {
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "attn_layer_indices": [2, 5],
            "mamba_expand": 1,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": _CHUNK,
        },
        # hidden / heads = 16. Every layer has experts beside its shared MLP.
        "granitemoehybrid": _COMMON
        | {
            "hidden_size": 128,
            "intermediate_size": 54,
            "shared_intermediate_size": 86,
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
            "mamba_expand": 2,
            "mamba_n_heads": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": _CHUNK,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.35,
            "logits_scaling": 1.7,
        },
        # All four kinds of blocks. Experts stand in two groups and work on a latent of their own.
        "nemotron_h": _COMMON
        | {
            "hidden_size": 96,
            "head_dim": 16,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
                "mlp",
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "chunk_size": _CHUNK,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 54,
            "moe_latent_size": 40,
            "moe_shared_expert_intermediate_size": 86,
            "routed_scaling_factor": 1.6,
        },
        # hidden / heads = 16. The inner width is not expand x hidden_size.
        "falcon_h1": _COMMON
        | {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "mamba_d_ssm": 160,
            "mamba_n_heads": 8,
            "mamba_d_head": 20,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_d_conv": 3,
            "mamba_chunk_size": _CHUNK,
            "embedding_multiplier": 2.2,
            "lm_head_multiplier": 0.6,
            "key_multiplier": 1.4,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 1.6,
            "mlp_multipliers": [0.8, 1.3],
            "ssm_multipliers": [1.4, 0.7, 1.3, 0.8, 1.2],
        },
        # Layers 2 and 5 attend, 1 and 5 have experts.
        "qwen3_next": _COMMON
        | {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 54,
            "shared_expert_intermediate_size": 58,
        },
        # Layer 0 is dense. Four groups of two experts.
        "deepseek_v3": _COMMON
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
            "q_lora_rank": 40,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 54,
            "routed_scaling_factor": 1.4,
            "num_nextn_predict_layers": 0,
        },
    }
)
"""family -> values of its config class."""
