"""Tiny models of the families with Mamba layers, for tests.models.tiny."""

from __future__ import annotations

from typing import Any

_ABSENT = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"), "absent"
)

MAMBA_DIMS: dict[str, dict[str, Any]] = {
    "mamba2": _ABSENT
    | {
        "head_dim": 16,
        "num_heads": 8,
        "n_groups": 2,
        "state_size": 12,
        "use_bias": True,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-3,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
        "pad_token_id": 0,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 27,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.35,
        "logits_scaling": 1.7,
    },
    "nemotron_h": {
        "num_hidden_layers": "absent",
        "rms_norm_eps": "absent",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 10,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-9,  # so that nothing is cut
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 20,
        "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 27,
        "routed_scaling_factor": 1.6,
        "layer_norm_epsilon": 1e-3,
    },
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 16,
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
}
"""Family -> what it has beyond, or instead of, tiny.DIMS. Heads allow TP 4; groups are fewer."""
