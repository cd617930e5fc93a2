"""Attention over the paged KV cache: a step's metadata, the backends, and which layers share metadata.

metadata: `CommonAttentionMetadata`, built once per step and KV group. transforms: variants of it for layers
with local attention or few tokens. backend: the protocol of attention backends, and a layer's constants
(`AttentionParams`; `MlaParams` for latent attention). backends: reference (plain torch), cpu (C++ or torch),
triton; `get_backend` finds one by name. groups: layers of one KV group that share a builder
(`AttentionGroup`).
"""

from rayk.attention.backend import AttentionBackend, AttentionParams, MlaParams, PagedAttentionMetadata
from rayk.attention.backends import get_backend
from rayk.attention.groups import (
    AttentionGroup,
    AttentionGroups,
    AttentionLayer,
    AttentionView,
    make_attention_groups,
)
from rayk.attention.metadata import CommonAttentionMetadata

__all__ = [
    "AttentionBackend",
    "AttentionGroup",
    "AttentionGroups",
    "AttentionLayer",
    "AttentionParams",
    "AttentionView",
    "CommonAttentionMetadata",
    "MlaParams",
    "PagedAttentionMetadata",
    "get_backend",
    "make_attention_groups",
]
