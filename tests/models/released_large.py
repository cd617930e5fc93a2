"""config.json of seven large releases, as in `released`, and what was published of them."""

from __future__ import annotations

from typing import Any

from tests.models.released import GPT_OSS_20B, LLAMA3
from tests.models.released_experts import DEEPSEEK_V3, QWEN3_235B, QWEN3_NEXT_80B
from tests.models.released_gemma3n import GEMMA_3N_E4B
from tests.models.released_mamba import NEMOTRON_H_8B

# Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783): 126 layers, 16384, 53248, 128 and 8 heads.
LLAMA_31_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# Table 1 of the gpt-oss model card (arXiv 2508.10925): the 20b's sizes in 36 layers of 128 experts.
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "torch_dtype": "bfloat16",
}
# The file of the FP8 release also lists every router and norm in modules_to_not_convert.
QWEN3_235B_FP8 = QWEN3_235B | {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(94))],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
# Table 1 of the Nemotron-H report (arXiv 2504.03624): 118 layers, of which 54 are Mamba2, 54 MLPs and 10
# attend with 64 and 8 heads; 8192, 32768, state 256 in 8 groups. Attention is spread evenly here; the
# release may have another order, on which no count depends.
NEMOTRON_H_56B = NEMOTRON_H_8B | {
    "hidden_size": 8192,
    "hybrid_override_pattern": "M-M-M*-" + "M-M-M-M-M-M*-" * 8 + "M-M-M*-",
    "intermediate_size": 32768,
    "mamba_num_heads": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 118,
    "ssm_state_size": 256,
}
LARGE: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "gpt-oss-120b": GPT_OSS_120B,
    "Qwen3-235B-A22B-FP8": QWEN3_235B_FP8,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B,
    "Llama-3.1-405B": LLAMA_31_405B,
    "Nemotron-H-56B": NEMOTRON_H_56B,
    "gemma-3n-E4B": GEMMA_3N_E4B,
}
