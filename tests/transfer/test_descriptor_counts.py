"""How many descriptors a request takes, by formula (jobs/benchmarks/descriptors.py has tables)."""

from __future__ import annotations

import numpy as np
import pytest

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.plan import BlockReads, plan_transfer

LAYERS, HEADS, BLOCK, NUM_BLOCKS = 6, 8, 16, 40
SCATTERED = [3, 4, 5, 9, 10, 20, 21, 22, 23, 30]
"""Four runs of consecutive blocks."""
CONSECUTIVE = list(range(1, 11))


def ranks(layout: str, tp: int) -> list[RankGeometry]:
    spec = FullAttentionSpec(BLOCK, HEADS, 4, 4, "float16", HEADS)
    groups = group_layers({(layer, spec.part): spec for layer in range(LAYERS)})
    return [
        plan_rank(groups, LAYOUTS[layout], shape=EngineShape(tp), rank=rank, num_blocks=NUM_BLOCKS)
        for rank in range(tp)
    ]


def reads(layout: str, tp: tuple[int, int], table: list[int]) -> list[list[BlockReads]]:
    """By consumer rank; the same block ids on both sides."""
    producers, consumers = ranks(layout, tp[0]), ranks(layout, tp[1])
    num_tokens = len(table) * BLOCK
    return [plan_transfer(producers, c).lower(num_tokens, [table], [table]) for c in consumers]


def counted(layout: str, tp: tuple[int, int], table: list[int]) -> tuple[int, int]:
    """(descriptors, those left after merging) of all consumer ranks."""
    found = [r for of_rank in reads(layout, tp, table) for r in of_rank]
    return sum(r.num_descriptors for r in found), sum(r.num_coalesced for r in found)


def merged_by_hand(read: BlockReads) -> int:
    """Descriptors in order, each joined to the one before where it continues it on both sides."""
    source, destination = read.indices(NUM_BLOCKS, NUM_BLOCKS)
    pattern, count = read.pattern, 0
    end = (-1, -1)
    for here, there in zip(source.tolist(), destination.tolist(), strict=True):
        run = here // NUM_BLOCKS
        start = (
            int(pattern.runs.source[run] + here % NUM_BLOCKS * pattern.source_strides[run]),
            int(pattern.runs.destination[run] + there % NUM_BLOCKS * pattern.destination_strides[run]),
        )
        count += start != end
        size = int(pattern.runs.lengths[run])
        end = (start[0] + size, start[1] + size)
    return count


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_same_tp_and_blocks_outermost_take_one_per_run_of_blocks(layout: str, tp: int):
    assert counted(layout, (tp, tp), SCATTERED) == (tp * len(SCATTERED), tp * 4)
    assert counted(layout, (tp, tp), CONSECUTIVE) == (tp * len(CONSECUTIVE), tp)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_layer_by_layer_takes_as_many_times_more_as_there_are_layers(layout: str):
    assert counted(layout, (1, 1), SCATTERED) == (LAYERS * len(SCATTERED), LAYERS * 4)
    assert counted("LHBNC", (1, 1), SCATTERED) == (
        LAYERS * HEADS * len(SCATTERED),
        LAYERS * HEADS * 4,
    )


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (4, 2), (2, 8), (8, 1)], ids=str)
def test_heads_outside_layers_take_one_per_head_slice_and_block_under_other_tp(tp: tuple[int, int]):
    """A head slice: the heads that a pair of ranks has in common. Where layers lie outside heads, one more
    for each layer; where tokens do, for each token."""
    slices = max(tp)
    per_block = {
        "BHLNC": 1,
        "BLHNC": LAYERS,
        "LBHNC": LAYERS,
        "BLNHC": LAYERS * BLOCK,
        "LBNHC": LAYERS * BLOCK,
    }
    for layout, runs in per_block.items():
        wanted = slices * runs * len(CONSECUTIVE)
        assert counted(layout, tp, CONSECUTIVE) == (wanted, wanted)


def test_merging_is_what_descriptors_in_order_allow():
    for layout in LAYOUTS:
        for tp in ((1, 1), (1, 2), (2, 1)):
            for of_rank in reads(layout, tp, SCATTERED):
                for read in of_rank:
                    # The last block of one run and the first of the next never touch here.
                    assert read.num_coalesced == merged_by_hand(read)
                    assert len(np.unique(read.indices(NUM_BLOCKS, NUM_BLOCKS)[0])) == read.num_descriptors
