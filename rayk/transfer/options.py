"""What the two ways of a read cost, and how many layers a push writes at once. Pure; free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rayk.kv.geometry import RankGeometry
from rayk.transfer.costs import MAX_DESCRIPTORS, Option, TransferCosts, choose_push_layers
from rayk.transfer.extents import Extents, Ints
from rayk.transfer.plan import BlockReads, TransferPlan, consecutive_tables

CHOICE_TOKENS = 1024
"""The prompt that the cost model chooses layers per write for."""


def read_option(
    read: BlockReads, parts: Sequence[Extents], costs: TransferCosts, staging_bytes: int
) -> Option:
    """`parts`: how its pattern is staged through a buffer of so many bytes; none where it cannot be."""
    num_blocks = len(read.source_blocks)
    direct_ns = costs.move_ns(read.num_descriptors, read.num_coalesced, read.num_bytes)
    staged_ns, num_staged = 0.0, 0
    for part in parts:
        num_chunks = -(-num_blocks // chunk_blocks(part, staging_bytes))
        num_staged += len(part) * num_blocks
        staged_ns += costs.move_ns(
            len(part) * num_blocks,
            num_merged(part, read.source_blocks),
            part.block_bytes * num_blocks,
            num_chunks,
        )
        staged_ns += costs.repack_ns(part.num_runs * num_blocks, part.run_bytes * num_blocks, num_chunks)
    return Option(direct_ns, read.num_descriptors, staged_ns if parts else None, num_staged)


def chunk_blocks(part: Extents, staging_bytes: int) -> int:
    """Count the blocks of a chunk: so many that a second one can arrive while the first is copied out."""
    blocks = part.max_blocks(staging_bytes // 2) or part.max_blocks(staging_bytes)
    return max(1, min(blocks, MAX_DESCRIPTORS // len(part)))


def num_merged(part: Extents, source_blocks: Ints) -> int:
    """Descriptors left when consecutive blocks of dense extents are read as one."""
    num_descriptors = len(part) * len(source_blocks)
    if not part.num_dense:
        return num_descriptors
    steps = int(np.count_nonzero(source_blocks[1:] - source_blocks[:-1] == 1))
    return num_descriptors - part.num_dense * steps


def kept_layers(geometry: RankGeometry) -> tuple[int, ...]:
    """List layers that keep something, ascending."""
    return tuple(sorted({layer for g in geometry.groups for layer in g.layers}))


def choose_layers(
    costs: TransferCosts, me: RankGeometry, plans: Mapping[int, TransferPlan], layer_ns: float
) -> int:
    """Ask the cost model for the layers per write, of the consumer rank that gets most.

    `plans`: of plan_pushes; layer_ns: see choose_push_layers.
    """
    layers = kept_layers(me)
    if not plans:
        return len(layers)
    tokens = min(CHOICE_TOKENS, _most_tokens(me))

    def num_coalesced(plan: TransferPlan, count: int) -> int:
        tables = consecutive_tables(me, tokens), consecutive_tables(plan.consumer, tokens)
        return sum(w.num_coalesced for w in plan.lower(tokens, *tables, layers=layers[:count]))

    def num_bytes(plan: TransferPlan) -> int:
        tables = consecutive_tables(me, tokens), consecutive_tables(plan.consumer, tokens)
        return sum(w.num_bytes for w in plan.lower(tokens, *tables))

    most = max(plans.values(), key=num_bytes)
    return choose_push_layers(
        costs,
        num_layers=len(layers),
        num_bytes=num_bytes(most),
        num_descriptors=lambda count: max(1, num_coalesced(most, count)),
        layer_ns=layer_ns,
    )


def _most_tokens(geometry: RankGeometry) -> int:
    """Estimate the tokens of a sequence alone in the engine, roughly: so many fit."""
    num_tables = sum(g.group.rides is None for g in geometry.groups)
    per_group = max(1, (geometry.num_pool_blocks - 1) // num_tables)
    return per_group * min(g.block_size for g in geometry.groups)
