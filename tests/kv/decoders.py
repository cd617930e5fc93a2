"""Decoders as their configs would describe them, made of layers named by a letter."""

from __future__ import annotations

from rayk.models.config import DecoderConfig, LayerConfig, Mamba2Config, MlpConfig, NormConfig

WINDOW = 9
MLP = MlpConfig(intermediate_size=32)


def layer(kind: str, chunk: int = 6) -> LayerConfig:
    """full, sliding over WINDOW tokens, chunked, or state (Mamba2); `chunked:2` uses layer 2's cache."""
    name, _, source = kind.partition(":")
    return LayerConfig(
        mixer="mamba2" if name == "state" else "attention",
        window=WINDOW if name == "sliding" else None,
        chunk=chunk if name == "chunked" else None,
        kv_source=int(source) if source else None,
        rope=None,
        mlp=MLP,
    )


def decoder(*layers: str | LayerConfig, chunk: int = 6) -> DecoderConfig:
    """Two KV heads of 8 for four query heads: 128 bytes per token and layer in float32."""
    made = tuple(layer(kind, chunk) if isinstance(kind, str) else kind for kind in layers)
    return DecoderConfig(
        architecture="Made",
        family="made",
        hidden_size=32,
        num_layers=len(made),
        num_query_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=64,
        max_positions=512,
        norm=NormConfig(eps=1e-5),
        tie_embeddings=False,
        dtype="float32",
        layers=made,
        mamba2=Mamba2Config(
            num_heads=4,
            head_size=16,
            num_groups=1,
            state_size=16,
            conv_width=4,
            conv_bias=True,
            proj_bias=False,
            gate="gate_norm",
            norm_eps=1e-5,
        ),
    )
