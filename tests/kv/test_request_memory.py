"""What requests of given lengths hold, counted by hand and by what a transfer of them moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayk.kv.groups import group_layers, measure_groups
from rayk.kv.request_memory import RequestMemory, measure_request_memory
from rayk.kv.specs import FullAttentionSpec, MlaSpec, SlidingWindowSpec
from rayk.transfer.plan import consecutive_tables, plan_transfer
from tests.transfer.test_plan import make_ranks

FULL = FullAttentionSpec(16, 2, 8, 8, "float32", 4)
ROW = 2 * 2 * 8 * 4
"""K and V of 2 heads of 8, float32."""


def test_the_last_block_is_wasted_past_the_last_token() -> None:
    groups = group_layers({(layer, "attention"): FULL for layer in range(3)})
    [memory] = measure_request_memory(groups, 1, [16, 17, 5, 5])
    # 1, 2, 1 and 1 blocks of 16 rows, of which 16, 17, 5 and 5 are used.
    assert (memory.used_bytes, memory.wasted_bytes) == (43 * 3 * ROW, (80 - 43) * 3 * ROW)
    assert (memory.num_requests, memory.padding_bytes, memory.replicated_bytes) == (4, 0, 0)


@pytest.mark.parametrize(("tp", "copies"), [(1, 1), (2, 1), (4, 2)])
def test_heads_that_ranks_share_are_replicated(tp: int, copies: int) -> None:
    groups = group_layers({(0, "attention"): FULL})
    [memory] = measure_request_memory(groups, tp, [20])
    assert memory.replicated_bytes == (copies - 1) * 32 * ROW
    latent = group_layers({(0, "attention"): MlaSpec(16, 8, 4, "float32", 4)})
    [memory] = measure_request_memory(latent, tp, [20])
    assert memory.replicated_bytes == (tp - 1) * (memory.used_bytes + memory.wasted_bytes)


@pytest.mark.parametrize(("tp", "dcp", "copies"), [(4, 2, 1), (8, 2, 2), (8, 4, 1)])
def test_dealt_tokens_are_kept_once_per_run_of_ranks(tp: int, dcp: int, copies: int) -> None:
    groups = group_layers({(0, "attention"): replace(FULL, num_query_heads=8)}, dcp=dcp)
    [memory] = measure_request_memory(groups, tp, [20], dcp)
    # Block ids cover 16 tokens of each rank of a run: one id of 32 or 64 tokens here.
    assert memory.block_size == 16 * dcp
    assert memory.replicated_bytes == (copies - 1) * 16 * dcp * ROW
    latent = group_layers({(0, "attention"): MlaSpec(16, 8, 4, "float32", 8)}, dcp=dcp)
    [memory] = measure_request_memory(latent, tp, [20], dcp)
    assert memory.replicated_bytes == (tp // dcp - 1) * (memory.used_bytes + memory.wasted_bytes)


def test_a_window_wastes_what_lies_before_it_in_its_first_block() -> None:
    groups = group_layers({(0, "attention"): SlidingWindowSpec(16, 2, 8, 8, "float32", 4, 20)})
    [memory] = measure_request_memory(groups, 1, [60])
    # Rows 41 to 59 live, in the blocks of rows 32 to 63.
    assert (memory.used_bytes, memory.wasted_bytes) == (19 * ROW, 13 * ROW)
    assert isinstance(memory, RequestMemory)
    assert memory.used_bytes == measure_groups(groups, 60)[0].used_bytes


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("num_tokens", [5, 32, 37])
def test_what_moves_beside_the_rows_of_tokens_is_the_rest_of_their_blocks(
    prefill: int, decode: int, num_tokens: int
) -> None:
    """What reports say of bytes moved and compared, of plans of real ranks."""
    specs = dict.fromkeys(range(2), FULL)
    producers = make_ranks(specs, "BHLNC", prefill, 8, None)
    consumers = make_ranks(specs, "LBHNC", decode, 8, None)
    moved = 0
    for consumer in consumers:
        tables = (consecutive_tables(producers[0], num_tokens), consecutive_tables(consumer, num_tokens))
        for read in plan_transfer(producers, consumer).lower(num_tokens, *tables):
            moved += read.num_bytes
    groups = group_layers({(layer, "attention"): FULL for layer in range(2)})
    [memory] = measure_request_memory(groups, decode, [num_tokens])
    assert moved == memory.used_bytes + memory.wasted_bytes + memory.replicated_bytes
    copies = 2 if decode == 4 else 1
    assert moved - copies * memory.used_bytes == copies * memory.wasted_bytes
