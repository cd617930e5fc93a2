"""config.json of the released Llama 4 models, as in `released`; their vision settings are cut short."""

from __future__ import annotations

from typing import Any

_BESIDE_TEXT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "vision_output_dim": 4096,
    },
}
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 202048,
}

LLAMA_4_SCOUT: dict[str, Any] = _BESIDE_TEXT | {
    "text_config": _TEXT
    | {
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 262144,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_qk_norm": True,
    }
}

LLAMA_4_MAVERICK: dict[str, Any] = _BESIDE_TEXT | {
    "text_config": _TEXT
    | {
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    }
}
