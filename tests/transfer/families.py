"""What layers of each family keep, small: specs for (tokens per attention block, tokens per state).

24 heads everywhere, so that TP 1, 2, 3, 4, 6 and 8 divide them; fewer KV heads, groups and key heads, so that
ranks share them evenly, unevenly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rayk.kv.groups import CacheKey
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    SlidingWindowSpec,
)

Specs = dict[CacheKey, KVCacheSpec]
HEADS = 24


def attention(block_size: int, kv_heads: int = 3, dtype: str = "bfloat16") -> FullAttentionSpec:
    return FullAttentionSpec(block_size, kv_heads, 6, 4, dtype, HEADS)


def sliding(block_size: int, window: int = 7, kv_heads: int = 3) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, kv_heads, 6, 4, "bfloat16", HEADS, window)


def chunked(block_size: int, chunk: int, kv_heads: int = 3) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size, kv_heads, 6, 4, "bfloat16", HEADS, chunk)


def latent(block_size: int) -> MlaSpec:
    return MlaSpec(block_size, 10, 4, "bfloat16", HEADS)


def mamba1(state_block_size: int) -> Mamba1Spec:
    return Mamba1Spec(state_block_size, "bfloat16", 4, 16 * HEADS, 2)


def mamba2(state_block_size: int, groups: int = 8, dtype: str = "bfloat16") -> Mamba2Spec:
    return Mamba2Spec(state_block_size, dtype, 4, HEADS, 4, groups, 6)


def delta(state_block_size: int, key_heads: int = 6) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(state_block_size, "float16", 4, key_heads, 4, HEADS, 2)


def _layers(*layers: KVCacheSpec | tuple[KVCacheSpec, ...] | None) -> Specs:
    """Layer by layer: one cache, several, or none."""
    specs: Specs = {}
    for index, layer in enumerate(layers):
        for spec in layer if isinstance(layer, tuple) else (layer,) if layer is not None else ():
            specs[index, spec.part] = spec
    return specs


def _mamba2(block: int, state: int, groups: int = 8) -> Specs:
    return _layers(*[mamba2(state, groups)] * 2)


def _jamba(block: int, state: int) -> Specs:
    return _layers(mamba1(state), mamba1(state), attention(block, dtype="float32"), mamba1(state))


def _bamba(block: int, state: int) -> Specs:
    return _layers(mamba2(state, 1, "float32"), attention(block, 8, "float32"), mamba2(state, 1, "float32"))


def _granitemoehybrid(block: int, state: int) -> Specs:
    return _layers(mamba2(state, 2), mamba2(state, 2), mamba2(state, 2), attention(block, 4))


def _nemotron_h(block: int, state: int) -> Specs:
    return _layers(mamba2(state, 4), None, attention(block, 2), mamba2(state, 4), None)


def _falcon_h1(block: int, state: int) -> Specs:
    return _layers(*[(attention(block, 6), mamba2(state, 1))] * 2)


def _qwen3_next(block: int, state: int) -> Specs:
    return _layers(delta(state), delta(state), delta(state), attention(block, 2))


def _deepseek_v3(block: int, state: int) -> Specs:
    return _layers(*[latent(block)] * 3)


def _llama4(block: int, state: int) -> Specs:
    """Runs of 9 positions: they begin anywhere in a block, and a sequence of 9 tokens ends with one."""
    return _layers(*[chunked(block, 9)] * 3, attention(block))


def _gemma3n(block: int, state: int) -> Specs:
    """The last layers use the pages of the others."""
    return _layers(sliding(block, 11, 2), sliding(block, 11, 2), attention(block, 2), None, None, None)


def _chunks_that_share(block: int, state: int) -> Specs:
    """Chunks of two lengths beside a state that makes blocks grow; every other layer of attention shares."""
    return _layers(
        chunked(block, 8), None, (chunked(block, 21), mamba1(state)), mamba1(state), attention(block), None
    )


def _everything(block: int, state: int) -> Specs:
    """No model has this: every kind side by side."""
    return _layers(
        latent(block),
        (sliding(block), mamba1(state)),
        (attention(block), delta(state, 3)),
        mamba2(state, 3),
        sliding(block),
    )


FAMILIES: dict[str, Callable[[int, int], Specs]] = {
    "mamba2": _mamba2,
    "mamba2-1-group": partial(_mamba2, groups=1),
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _granitemoehybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek_v3,
    "llama4": _llama4,
    "gemma3n": _gemma3n,
    "chunks that share": _chunks_that_share,
    "everything": _everything,
}
