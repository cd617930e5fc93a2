"""What each layer of a model keeps in the KV cache. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig


def kv_cache_specs(
    config: DecoderConfig, *, block_size: int, dtype: str, hybrid_kv: bool = True
) -> dict[int, KVCacheSpec]:
    """Layer index -> spec, for the layers that keep anything; `block_size` in tokens.

    Without `hybrid_kv`, windowed layers keep every token too (their attention still slides), so
    that all layers fall into one group.
    """
    specs: dict[int, KVCacheSpec] = {}
    for index in config.attention_layers:
        window = config.layers[index].window
        full = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_size_k=config.head_size_k,
            head_size_v=config.head_size_v,
            dtype=dtype,
            num_query_heads=config.num_query_heads,
        )
        specs[index] = full
        if hybrid_kv and window is not None:
            specs[index] = SlidingWindowSpec(
                block_size=full.block_size,
                num_kv_heads=full.num_kv_heads,
                head_size_k=full.head_size_k,
                head_size_v=full.head_size_v,
                dtype=full.dtype,
                num_query_heads=full.num_query_heads,
                window=window,
            )
    return specs
