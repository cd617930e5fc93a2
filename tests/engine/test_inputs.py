"""The tensors of a step against plain loops over tokens, blocks and slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayk.engine.inputs import InputBuilder, to_kernel_blocks
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.types.batch import ScheduledBatch
from rayk.types.request import Request, SamplingParams
from tests.kv.brute import full, sliding

BLOCK = 8
GROUPS = group_layers({(0, "attention"): full(BLOCK), (1, "attention"): sliding(11, full(BLOCK))})


def make_builder(kernel_block_size: int) -> InputBuilder:
    geometry = plan_rank(
        GROUPS,
        LAYOUTS["BHLNC"],
        tp_size=1,
        tp_rank=0,
        num_blocks=40,
        kernel_block_sizes=(kernel_block_size,) * len(GROUPS),
    )
    return InputBuilder(geometry, max_seqs=3, max_positions=100, device=torch.device("cpu"))


@pytest.mark.parametrize("kernel_block_size", [8, 4, 2])
@pytest.mark.usefixtures("poisoned_empty")
def test_steps_match_a_loop_over_tokens(kernel_block_size: int) -> None:
    """Mixed prefill and decode steps of requests that come and go, from a real scheduler."""
    builder = make_builder(kernel_block_size)
    manager = KVCacheManager(GROUPS, 40)
    scheduler = Scheduler(manager, max_batch_tokens=13, max_seqs=3, max_positions=100)
    random = np.random.default_rng(0)
    kinds = set()
    for step in range(60):
        if step % 4 == 0:
            prompt = tuple(random.integers(0, 500, size=random.integers(1, 30)).tolist())
            scheduler.add(Request(request_id=str(step), prompt_token_ids=prompt, sampling=SamplingParams()))
        batch = scheduler.schedule()
        if batch is None:
            continue
        kinds.add(tuple(sorted({len(r.token_ids) == 1 for r in batch.requests})))
        check_step(builder, batch, manager, kernel_block_size)
        scheduler.update(batch, {r.request_id: 7 for r in batch.requests})
    assert (False, True) in kinds, "some steps mix prefill and decode"


def check_step(builder: InputBuilder, batch: ScheduledBatch, manager: KVCacheManager, kernel: int) -> None:
    inputs = builder.build(batch)
    tokens, positions, wanted, starts = [], [], [], [0]
    for r in batch.requests:
        tokens += r.token_ids
        positions += range(r.num_computed_tokens, r.num_computed_tokens + len(r.token_ids))
        starts.append(len(tokens))
        if r.needs_logits:
            wanted.append(len(tokens) - 1)
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.logits_index.tolist() == wanted
    lengths = [r.num_computed_tokens + len(r.token_ids) for r in batch.requests]
    for index, common in enumerate(inputs.metadata):
        assert common.query_start_loc.tolist() == list(common.query_start_loc_cpu) == starts
        assert common.seq_lens.tolist() == list(common.seq_lens_cpu) == lengths
        assert (common.num_tokens, common.max_seq_len) == (len(tokens), max(lengths))
        assert common.max_query_len == max(len(r.token_ids) for r in batch.requests)
        dtypes = (common.query_start_loc, common.seq_lens, common.block_table, common.slot_mapping)
        assert [t.dtype for t in dtypes] == [torch.int32, torch.int32, torch.int32, torch.int64]
        slots = []
        for i, r in enumerate(batch.requests):
            table = manager.block_tables(r.request_id)[index]
            for position in range(lengths[i]):
                block, slot = table[position // BLOCK], position % BLOCK
                if block == 0:
                    continue  # out of the window, whatever the ranks still have there
                kernel_block = block * (BLOCK // kernel) + slot // kernel
                assert int(common.block_table[i, position // kernel]) == kernel_block
                if position >= r.num_computed_tokens:
                    slots.append(kernel_block * kernel + slot % kernel)
        assert common.slot_mapping.tolist() == slots


def test_kernel_blocks_of_a_block_follow_each_other() -> None:
    assert to_kernel_blocks((3, 1), 4).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert to_kernel_blocks([], 2).tolist() == []
