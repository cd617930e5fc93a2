"""config.json of the released Gemma 3n models, as in `released`; what is not text is cut short."""

from __future__ import annotations

from typing import Any

_BESIDE_TEXT: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"hidden_size": 1536, "model_type": "gemma3n_audio", "vocab_offset": 262272},
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "eos_token_id": [1, 106],
    "image_token_id": 262145,
    "initializer_range": 0.02,
    "model_type": "gemma3n",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0.dev0",
    "vision_config": {"hidden_size": 2048, "model_type": "gemma3n_vision", "vocab_offset": 262144},
    "vision_soft_tokens_per_image": 256,
}
_TEXT: dict[str, Any] = {
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "laurel_rank": 64,
    "max_position_embeddings": 32768,
    "model_type": "gemma3n_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}


def _text(num_layers: int, num_sharing: int, intermediate_size: int) -> dict[str, Any]:
    return _TEXT | {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (num_layers - 10),
        "intermediate_size": [intermediate_size] * num_layers,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * (num_layers // 5),
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_sharing,
    }


GEMMA_3N_E2B: dict[str, Any] = _BESIDE_TEXT | {"text_config": _text(30, 10, 8192)}
GEMMA_3N_E4B: dict[str, Any] = _BESIDE_TEXT | {"text_config": _text(35, 15, 16384)}
