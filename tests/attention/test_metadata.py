"""Common metadata from host lengths."""

from __future__ import annotations

import pytest
import torch

from rayk.attention import CommonAttentionMetadata


def build(query_lens: list[int], seq_lens: list[int], num_slots: int) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_host(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.zeros(len(seq_lens), 4, dtype=torch.int64),
        slot_mapping=torch.arange(num_slots),
        block_size=16,
    )


def test_from_host_packs_requests() -> None:
    common = build([1, 5, 2], [9, 5, 30], 8)
    assert common.query_start_loc.tolist() == [0, 1, 6, 8] == list(common.query_start_loc_cpu)
    assert common.seq_lens.tolist() == [9, 5, 30] == list(common.seq_lens_cpu)
    for tensor in (common.query_start_loc, common.seq_lens, common.block_table):
        assert tensor.dtype == torch.int32
    assert common.slot_mapping.dtype == torch.int64
    assert (common.num_requests, common.num_tokens) == (3, 8)
    assert (common.max_query_len, common.max_seq_len) == (5, 30)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_slots"),
    [([1], [1], 2), ([2], [1], 2), ([0], [1], 0), ([1, 1], [1], 2)],
    ids=["slots", "more-queries-than-tokens", "empty-request", "lengths"],
)
def test_inconsistent_lengths_are_errors(query_lens: list[int], seq_lens: list[int], num_slots: int) -> None:
    with pytest.raises(AssertionError):
        build(query_lens, seq_lens, num_slots)
