"""The tensors of a step against plain loops over tokens, blocks, slots and segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayk.attention.metadata import CommonAttentionMetadata
from rayk.engine.inputs import InputBuilder, ModelInputs, to_kernel_blocks
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kv.geometry import plan_rank
from rayk.kv.layout import LAYOUTS
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.types.batch import ScheduledBatch
from rayk.types.request import Request, SamplingParams
from tests.helpers import poison
from tests.kv.brute import full, sliding
from tests.sched.world import one_layer_each, state

GROUPS = one_layer_each(full(8), state(3), sliding(11, full(16)), state(1000), state(8))
NUM_BLOCKS = 60


def make_builder(kernel_block_sizes: tuple[int, int]) -> InputBuilder:
    """`kernel_block_sizes` of the two groups of attention."""
    geometry = plan_rank(
        GROUPS,
        LAYOUTS["BHLNC"],
        num_blocks=NUM_BLOCKS,
        kernel_block_sizes=(kernel_block_sizes[0], 1, kernel_block_sizes[1], 1, 1),
    )
    return InputBuilder(geometry, max_seqs=3, max_positions=100)


@pytest.mark.parametrize("kernel_block_sizes", [(8, 16), (8, 4), (2, 16), (1, 8)])
def test_steps_match_a_loop_over_tokens(
    kernel_block_sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed prefill and decode steps of requests that come and go, from a real scheduler."""
    with poison(monkeypatch):
        run_steps(kernel_block_sizes)


def run_steps(kernel_block_sizes: tuple[int, int]) -> None:
    builder = make_builder(kernel_block_sizes)
    manager = KVCacheManager(GROUPS, NUM_BLOCKS)
    scheduler = Scheduler(manager, max_batch_tokens=13, max_seqs=3, max_positions=100)
    random = np.random.default_rng(0)
    kinds, num_segments = set(), set()
    for step in range(60):
        if step % 4 == 0:
            prompt = tuple(random.integers(0, 500, size=random.integers(1, 30)).tolist())
            scheduler.add(Request(request_id=str(step), prompt_token_ids=prompt, sampling=SamplingParams()))
        batch = scheduler.schedule()
        if batch is None:
            continue
        kinds.add(tuple(sorted({len(r.token_ids) == 1 for r in batch.requests})))
        inputs = builder.build(batch)
        check_tokens(inputs, batch)
        check_attention(inputs, batch, manager, dict(zip((0, 2), kernel_block_sizes, strict=True)))
        for index in (1, 3, 4):
            num_segments |= check_segments(inputs, batch, manager, index)
        scheduler.update(batch, {r.request_id: 7 for r in batch.requests})
    assert (False, True) in kinds, "some steps mix prefill and decode"
    assert {1, 2, 3, 5} <= num_segments


def check_tokens(inputs: ModelInputs, batch: ScheduledBatch) -> None:
    tokens: list[int] = []
    positions: list[int] = []
    wanted, starts = [], [0]
    for r in batch.requests:
        tokens += r.token_ids
        positions += range(r.num_computed_tokens, r.num_computed_tokens + len(r.token_ids))
        starts.append(len(tokens))
        if r.needs_logits:
            wanted.append(len(tokens) - 1)
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.logits_index.tolist() == wanted
    longest = max(len(r.token_ids) for r in batch.requests)
    for metadata in inputs.metadata:
        assert metadata.query_start_loc.tolist() == list(metadata.query_start_loc_cpu) == starts
        assert metadata.query_start_loc.dtype == torch.int32
        assert (metadata.num_tokens, metadata.num_requests) == (len(tokens), len(batch.requests))
        assert metadata.max_query_len == longest


def check_attention(
    inputs: ModelInputs, batch: ScheduledBatch, manager: KVCacheManager, kernels: dict[int, int]
) -> None:
    lengths = [r.num_computed_tokens + len(r.token_ids) for r in batch.requests]
    for index, kernel in kernels.items():
        common, size = inputs.metadata[index], GROUPS[index].spec.block_size
        assert isinstance(common, CommonAttentionMetadata)
        assert common.seq_lens.tolist() == list(common.seq_lens_cpu) == lengths
        assert common.max_seq_len == max(lengths)
        dtypes = (common.seq_lens, common.block_table, common.slot_mapping)
        assert [t.dtype for t in dtypes] == [torch.int32, torch.int32, torch.int64]
        slots = []
        for i, r in enumerate(batch.requests):
            table = manager.block_tables(r.request_id)[index]
            for position in range(lengths[i]):
                block, slot = table[position // size], position % size
                if block == 0:
                    continue  # out of the window, whatever the ranks still have there
                kernel_block = block * (size // kernel) + slot // kernel
                assert int(common.block_table[i, position // kernel]) == kernel_block
                if position >= r.num_computed_tokens:
                    slots.append(kernel_block * kernel + slot % kernel)
        assert common.slot_mapping.tolist() == slots


def check_segments(
    inputs: ModelInputs, batch: ScheduledBatch, manager: KVCacheManager, index: int
) -> set[int]:
    """Carry the state from token to token; how many segments requests had."""
    found, size = inputs.metadata[index], GROUPS[index].spec.block_size
    assert isinstance(found, Segments)
    reads, starts, kept = [], [0], {}
    packed = 0
    for r in batch.requests:
        table = manager.block_tables(r.request_id)[index]
        before = r.num_computed_tokens - 1
        reads.append(NO_SLOT if before < 0 else table[before // size])
        last_of_block: dict[int, int] = {}
        for position in range(r.num_computed_tokens, r.num_computed_tokens + len(r.token_ids)):
            packed += 1
            last_of_block[table[position // size]] = packed
        kept |= last_of_block
        starts.append(starts[-1] + len(last_of_block))
    assert len(kept) == starts[-1], "no slot is written twice"
    assert 0 not in [*reads, *kept], "the null block holds no state"
    for tensor, expected, dtype in (
        (found.read_slots, reads, torch.int64),
        (found.segment_start_loc, starts, torch.int32),
        (found.segment_ends, list(kept.values()), torch.int32),
        (found.write_slots, list(kept), torch.int64),
    ):
        assert tensor.tolist() == expected
        assert tensor.dtype == dtype
    assert list(found.segment_start_loc_cpu) == starts
    assert list(found.segment_ends_cpu) == list(kept.values())
    return set(np.diff(starts).tolist())


def test_tables_are_as_wide_as_the_longest_request() -> None:
    # 100 positions in kernel blocks of 2 and of 16 tokens; states go by whole blocks.
    shapes = [(t.ids.shape[1], t.block_size) for t in make_builder((2, 16)).tables if not t.is_state]
    assert shapes == [(52, 2), (7, 16)]
    assert [t.block_size for t in make_builder((2, 16)).tables if t.is_state] == [3, 1000, 8]


def test_kernel_blocks_of_a_block_follow_each_other() -> None:
    assert to_kernel_blocks((3, 1), 4).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert to_kernel_blocks([], 2).tolist() == []
    # Two requests of three and two blocks: one after the other, as they count.
    tables = [to_kernel_blocks(ids, 2).tolist() for ids in ([0, 1, 2], [3, 4])]
    assert tables == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
