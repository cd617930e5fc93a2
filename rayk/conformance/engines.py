"""The engines a connector is tried between: what their layers keep, and where it lies. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayk.kv.formats import NVFP4_BLOCK
from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import CacheKey, KVCacheGroup, group_layers
from rayk.kv.layout import get_layout
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
from rayk.transfer.connector import ConnectorCase

NUM_LAYERS = 3
HEAD_SIZE = 8
WINDOW, CHUNK = 21, 24
STATE_TOKENS = 256
"""Tokens per block of a state: longer than any request here."""
DTYPE = "bfloat16"
QUANTISED = {"fp8-token-head": "fp8_e4m3_token_head", "nvfp4": "nvfp4"}
"""Model -> format of its keys and values (kv.formats): those with scales in the page."""


@dataclass(frozen=True, kw_only=True)
class EnginePair:
    """What a check is about: pairs are (producer, consumer)."""

    model: str = "full"
    num_kv_heads: int = 4
    num_query_heads: int = 8
    tp: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("BHLNC", "BHLNC")
    block_sizes: tuple[int, int] = (16, 16)
    num_blocks: tuple[int, int] = (40, 48)

    def specs(self, side: int) -> dict[CacheKey, KVCacheSpec]:
        """What each layer keeps on one side."""
        found: dict[CacheKey, KVCacheSpec] = {}
        for layer, specs in enumerate(_MODELS[self.model](self, self.block_sizes[side])):
            found.update(((layer, spec.part), spec) for spec in specs)
        return found

    def groups(self, side: int) -> tuple[KVCacheGroup, ...]:
        """The side's KV groups."""
        return group_layers(self.specs(side))

    def geometry(self, side: int, tp_rank: int) -> RankGeometry:
        """Where everything lies on one rank."""
        return plan_rank(
            self.groups(side),
            get_layout(self.layouts[side]),
            tp_size=self.tp[side],
            tp_rank=tp_rank,
            num_blocks=self.num_blocks[side],
        )

    def case(self, fault: str = "") -> ConnectorCase:
        """As a connector's `supports` is asked."""
        return ConnectorCase(
            kinds=tuple(dict.fromkeys(spec.kind for spec in self.specs(0).values())),
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            tp=self.tp,
            layouts=self.layouts,
            block_sizes=self.block_sizes,
            kv_format=QUANTISED.get(self.model, DTYPE),
            fault=fault,
        )


Layers = list[tuple[KVCacheSpec, ...]]


def _full(pair: EnginePair, block_size: int) -> FullAttentionSpec:
    heads = (pair.num_kv_heads, HEAD_SIZE, HEAD_SIZE, DTYPE, pair.num_query_heads)
    return FullAttentionSpec(block_size, *heads)


def _quantised(pair: EnginePair, block_size: int) -> FullAttentionSpec:
    # As many elements as share a scale.
    heads = (pair.num_kv_heads, NVFP4_BLOCK, NVFP4_BLOCK, QUANTISED[pair.model], pair.num_query_heads)
    return FullAttentionSpec(block_size, *heads)


def _sliding(pair: EnginePair, block_size: int) -> SlidingWindowSpec:
    heads = (pair.num_kv_heads, HEAD_SIZE, HEAD_SIZE, DTYPE, pair.num_query_heads)
    return SlidingWindowSpec(block_size, *heads, WINDOW)


def _chunked(pair: EnginePair, block_size: int) -> ChunkedLocalSpec:
    heads = (pair.num_kv_heads, HEAD_SIZE, HEAD_SIZE, DTYPE, pair.num_query_heads)
    return ChunkedLocalSpec(block_size, *heads, CHUNK)


def _latent(pair: EnginePair, block_size: int) -> MlaSpec:
    return MlaSpec(block_size, 2 * HEAD_SIZE, HEAD_SIZE, DTYPE, pair.num_query_heads)


def _mamba1(pair: EnginePair) -> Mamba1Spec:
    return Mamba1Spec(STATE_TOKENS, DTYPE, 4, 16 * pair.num_query_heads, 2)


def _mamba2(pair: EnginePair) -> Mamba2Spec:
    return Mamba2Spec(STATE_TOKENS, DTYPE, 4, pair.num_query_heads, 4, 2, 6)


def _delta(pair: EnginePair) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(STATE_TOKENS, DTYPE, 4, pair.num_query_heads // 2, 4, pair.num_query_heads, 4)


_MODELS: dict[str, Callable[[EnginePair, int], Layers]] = {
    "full": lambda p, b: [(_full(p, b),)] * NUM_LAYERS,
    "sliding": lambda p, b: [(_sliding(p, b),)] * NUM_LAYERS,
    "chunked": lambda p, b: [(_chunked(p, b),)] * NUM_LAYERS,
    **dict.fromkeys(QUANTISED, lambda p, b: [(_quantised(p, b),)] * NUM_LAYERS),
    "mla": lambda p, b: [(_latent(p, b),)] * NUM_LAYERS,
    "mamba1": lambda p, b: [(_mamba1(p),)] * NUM_LAYERS,
    "mamba2": lambda p, b: [(_mamba2(p),)] * NUM_LAYERS,
    "gdn": lambda p, b: [(_delta(p),)] * NUM_LAYERS,
    "full+sliding": lambda p, b: [(_full(p, b),), (_sliding(p, b),), (_sliding(p, b),)],
    "full+mamba2": lambda p, b: [(_mamba2(p),), (_full(p, b),), (_mamba2(p),)],
}
