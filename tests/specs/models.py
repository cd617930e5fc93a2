"""A model's config, made by hand: 8 query heads, 2 KV heads, 500 tokens, 1024 positions."""

from __future__ import annotations

from typing import Any

from rayk.models.config import DecoderConfig, LayerConfig, MlpConfig, NormConfig


def decoder(windows: tuple[int | None, ...] = (None, None), **changes: Any) -> DecoderConfig:
    """One layer per entry of `windows`."""
    mlp = MlpConfig(intermediate_size=128)
    fields: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM",
        "family": "qwen3",
        "hidden_size": 64,
        "num_layers": len(windows),
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "head_size": 16,
        "vocab_size": 500,
        "max_positions": 1024,
        "norm": NormConfig(eps=1e-6),
        "tie_embeddings": False,
        "dtype": "bfloat16",
        "layers": tuple(LayerConfig(window=w, rope=None, mlp=mlp) for w in windows),
        "eos_token_ids": (2,),
    }
    return DecoderConfig(**{**fields, **changes})


def spec(**changes: Any) -> dict[str, Any]:
    """A small spec as a mapping."""
    return {"model": "m", "prompts": {"random": {"count": 3, "input_tokens": [5, 37]}}, **changes}
