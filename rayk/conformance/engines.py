"""The pairs of engines that a connector is tried with: what their layers keep, and where. Free of torch."""

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
from rayk.parallel.shard import EngineShape, split_layers
from rayk.transfer.connector import ConnectorCase

NUM_LAYERS = 3
HEAD_SIZE = 8
WINDOW, CHUNK = 21, 24
STATE_TOKENS = 256
"""Tokens per block of a state: longer than any request here."""
DTYPE = "bfloat16"
QUANTISED = {"fp8-token-head": "fp8_e4m3_token_head", "nvfp4": "nvfp4"}
"""Model -> KV format, for formats with scales in the page."""


@dataclass(frozen=True, kw_only=True)
class EnginePair:
    """The engines of a check; pairs are (producer, consumer)."""

    model: str = "full"
    num_kv_heads: int = 4
    num_query_heads: int = 8
    tp: tuple[int, int] = (1, 1)
    dcp: tuple[int, int] = (1, 1)
    dcp_interleave: tuple[int, int] = (1, 1)
    pp: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("BHLNC", "BHLNC")
    block_sizes: tuple[int, int] = (16, 16)
    num_blocks: tuple[int, int] = (40, 48)

    def specs(self, side: int) -> dict[CacheKey, KVCacheSpec]:
        kinds = _LAYERS.get(self.model, (self.model,) * NUM_LAYERS)
        specs = [_SPECS[kind](self, self.block_sizes[side]) for kind in kinds]
        return {(layer, spec.part): spec for layer, spec in enumerate(specs)}

    def shape(self, side: int) -> EngineShape:
        num_layers, pp = len(self.specs(side)), self.pp[side]
        stages = split_layers(num_layers, pp) if pp > 1 else ()
        return EngineShape(self.tp[side], self.dcp[side], self.dcp_interleave[side], stages)

    def block_tokens(self, side: int) -> int:
        """Count the tokens of a block of attention on all ranks that deal them."""
        return self.block_sizes[side] * self.dcp[side]

    def groups(self, side: int) -> tuple[KVCacheGroup, ...]:
        return group_layers(self.specs(side), dcp=self.dcp[side])

    def geometry(self, side: int, rank: int) -> RankGeometry:
        return plan_rank(
            self.groups(side),
            get_layout(self.layouts[side]),
            shape=self.shape(side),
            rank=rank,
            num_blocks=self.num_blocks[side],
        )

    def case(self, fault: str = "") -> ConnectorCase:
        """Make the argument of a connector's `supports`."""
        return ConnectorCase(
            kinds=tuple(dict.fromkeys(spec.kind for spec in self.specs(0).values())),
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            tp=self.tp,
            layouts=self.layouts,
            block_sizes=self.block_sizes,
            kv_format=QUANTISED.get(self.model, DTYPE),
            fault=fault,
            dcp=self.dcp,
            dcp_interleave=self.dcp_interleave,
            pp=self.pp,
        )


def _heads(pair: EnginePair, size: int = HEAD_SIZE, dtype: str = DTYPE) -> tuple[int, int, int, str, int]:
    """Make the arguments of an attention spec after its block size."""
    return pair.num_kv_heads, size, size, dtype, pair.num_query_heads


_LAYERS = {
    "full+sliding": ("full", "sliding", "sliding"),
    "full+mamba2": ("mamba2", "full", "mamba2"),
}
"""Model -> kinds of its layers; other models are NUM_LAYERS of one kind."""

_SPECS: dict[str, Callable[[EnginePair, int], KVCacheSpec]] = {
    "full": lambda p, size: FullAttentionSpec(size, *_heads(p)),
    "sliding": lambda p, size: SlidingWindowSpec(size, *_heads(p), WINDOW),
    "chunked": lambda p, size: ChunkedLocalSpec(size, *_heads(p), CHUNK),
    # Heads of as many elements as share a scale.
    "fp8-token-head": lambda p, size: FullAttentionSpec(
        size, *_heads(p, NVFP4_BLOCK, QUANTISED["fp8-token-head"])
    ),
    "nvfp4": lambda p, size: FullAttentionSpec(size, *_heads(p, NVFP4_BLOCK, QUANTISED["nvfp4"])),
    "mla": lambda p, size: MlaSpec(size, 2 * HEAD_SIZE, HEAD_SIZE, DTYPE, p.num_query_heads),
    "mamba1": lambda p, _: Mamba1Spec(STATE_TOKENS, DTYPE, 4, 16 * p.num_query_heads, 2),
    "mamba2": lambda p, _: Mamba2Spec(STATE_TOKENS, DTYPE, 4, p.num_query_heads, 4, 2, 6),
    "gdn": lambda p, _: GatedDeltaNetSpec(
        STATE_TOKENS, DTYPE, 4, p.num_query_heads // 2, 4, p.num_query_heads, 4
    ),
}
"""Kind of layer -> its spec, given the engines and their block size."""
