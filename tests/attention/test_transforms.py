"""What transformed metadata lets every token see, against plain loops over the definitions; the fixtures."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rayk.attention import CommonAttentionMetadata
from rayk.attention.transforms import (
    chunked_local,
    fast_prefill,
    sliding_window,
    virtual_batches,
)
from tests.attention.brute import (
    Asked,
    check_consistent,
    make_common,
    requests_of_a_step,
    seen_keys,
    told_keys,
    wanted_tokens,
)


def snapshot(common: CommonAttentionMetadata) -> dict[str, Any]:
    """Every field's value, tensors as lists."""
    values = {field.name: getattr(common, field.name) for field in fields(common)}
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def test_virtual_batches_of_the_fixture() -> None:
    query_lens, key_lens = np.array([4, 10, 5]), np.array([6, 17, 9])
    batches = virtual_batches(query_lens, key_lens, 4)
    assert batches.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert batches.key_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert batches.key_starts.tolist() == [0, 4, 4, 8, 12, 16, 4, 8]
    assert batches.requests.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    first_ones = np.unique(batches.requests, return_index=True)[1]
    assert batches.query_lens[first_ones].tolist() == [2, 1, 4]
    assert np.bincount(batches.requests).tolist() == [2, 4, 2]


def test_chunked_local_of_the_fixture() -> None:
    requests = (Asked(2, 4), Asked(7, 10), Asked(4, 5))
    seen = chunked_local(make_common(requests, size=2), 4)
    assert seen.query_start_loc.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert seen.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    # Two blocks a chunk; where a chunk has one block so far, the other column is not read.
    blocks = [1, 2], [3], [1003, 1004], [1005, 1006], [1007, 1008], [1009], [2003, 2004], [2005]
    for row, ids in zip(seen.block_table.tolist(), blocks, strict=True):
        assert row[: len(ids)] == ids
    assert seen.block_table.shape == (8, 2)


def test_fast_prefill_of_the_fixture() -> None:
    requests = (Asked(0, 15, 1), Asked(3, 5, 2), Asked(30, 8, 1))
    common = make_common(requests, size=4)
    assert common.query_start_loc.tolist() == [0, 15, 20, 28]
    seen = fast_prefill(common, np.array([14, 18, 19, 27]))
    assert seen is not None
    assert seen.query_start_loc.tolist() == [0, 1, 3, 4]
    owners = np.repeat(np.arange(3), np.diff(seen.query_start_loc.numpy()))
    assert owners.tolist() == [0, 1, 1, 2]
    assert seen.seq_lens.tolist() == [15, 8, 38]
    assert seen.slot_mapping.tolist() == [-1] * 4
    assert (seen.num_tokens, seen.max_query_len, seen.max_seq_len) == (4, 2, 38)


def test_requests_without_wanted_tokens_vanish() -> None:
    """And with the longest of them its columns."""
    requests = (Asked(40, 9, 0), Asked(3, 5, 1), Asked(0, 8, 0), Asked(6, 1, 1))
    seen = fast_prefill(make_common(requests, size=4), np.array(wanted_tokens(requests)))
    assert seen is not None
    assert seen.query_start_loc.tolist() == [0, 1, 2]
    assert seen.seq_lens.tolist() == [8, 7]
    assert seen.block_table.tolist() == [[1001, 1002], [3001, 3002]]


def test_a_step_without_wanted_tokens_is_none() -> None:
    common = make_common((Asked(0, 8), Asked(4, 4)), size=4)
    assert fast_prefill(common, np.array([], dtype=np.int64)) is None


@pytest.mark.parametrize(
    "wanted",
    [[3], [6, 7], [0, 1, 2, 4], [5, 4], [4, 4], [4, 8], [-1, 4]],
    ids=["inside", "gap", "holes", "falling", "twice", "beyond", "negative"],
)
def test_tokens_that_are_not_the_last_cannot_be_wanted(wanted: list[int]) -> None:
    """Packed tokens: 0 to 4 of one request, 5 to 7 of another; the latter's last two are 6 and 7."""
    common = make_common((Asked(0, 5), Asked(4, 3)), size=4)
    if wanted == [6, 7]:
        assert fast_prefill(common, np.array(wanted)) is not None
        wanted = [5, 7]
    with pytest.raises(AssertionError, match="not the last of their request"):
        fast_prefill(common, np.array(wanted))


def test_chunks_that_begin_inside_kernel_blocks_are_refused() -> None:
    with pytest.raises(
        AssertionError, match="chunks of 6 positions do not begin where kernel blocks of 4 do"
    ):
        chunked_local(make_common((Asked(0, 5),), size=4), 6)


def test_what_changes_nothing_returns_what_it_was_given() -> None:
    """As long as nobody is past the first chunk, or sees past the first block; at each border, both sides."""
    size, chunk, window = 4, 12, 5
    within = make_common((Asked(0, chunk), Asked(11, 1)), size)
    assert chunked_local(within, chunk) is within
    assert chunked_local(make_common((Asked(chunk, 1),), size), chunk).seq_lens.tolist() == [1]
    # The token at position 8 sees 4 .. 8, all of the second block; the one at 7 sees 3 .. 7.
    near = make_common((Asked(7, 1), Asked(2, 3)), size)
    assert sliding_window(near, window) is near
    assert sliding_window(make_common((Asked(8, 1),), size), window).seq_lens.tolist() == [5]
    # Long, but its first token of the step sees the first block.
    prompt = make_common((Asked(0, 100), Asked(7, 30)), size)
    assert sliding_window(prompt, window) is prompt
    everything = make_common((Asked(5, 1, 1), Asked(0, 2, 2)), size)
    assert fast_prefill(everything, np.arange(3)) is everything


@settings(max_examples=150, deadline=None)
@given(
    requests=requests_of_a_step,
    size=st.integers(1, 8),
    blocks_per_chunk=st.none() | st.integers(1, 5),
    window=st.none() | st.integers(1, 40),
    fast=st.booleans(),
    gives_back=st.booleans(),
)
def test_every_token_sees_what_it_should(
    requests: list[Asked],
    size: int,
    blocks_per_chunk: int | None,
    window: int | None,
    fast: bool,
    gives_back: bool,
) -> None:
    """All three, alone and composed; windows and chunks of any size; blocks outside given back, or not."""
    chunk = None if blocks_per_chunk is None else blocks_per_chunk * size
    expected = seen_keys(requests, window=window, chunk=chunk, fast=fast)
    # Layers that make the keys compute every token.
    live = set().union(*seen_keys(requests, window=window, chunk=chunk)) if gives_back else None
    common = make_common(requests, size, live)
    before, given = snapshot(common), common
    wanted = np.array(wanted_tokens(requests), dtype=np.int64)
    if fast:
        reduced = fast_prefill(common, wanted)
        assert (reduced is None) == (not expected)
        if reduced is None:
            return
        common = reduced
    if chunk is not None:
        common = chunked_local(common, chunk)
    if window is not None:
        common = sliding_window(common, window)
    assert told_keys(common, window) == expected
    check_consistent(common)
    assert snapshot(given) == before, "a transform changed what it was given"
    if common is not given and common.num_tokens == given.num_tokens:
        assert common.slot_mapping is given.slot_mapping


@settings(max_examples=60, deadline=None)
@given(requests=requests_of_a_step, size=st.integers(1, 8), window=st.integers(1, 40))
def test_a_window_leaves_no_whole_block_in_front(requests: list[Asked], size: int, window: int) -> None:
    """Tables are as narrow as they can be: the first column of each row holds a key that is seen."""
    common = sliding_window(make_common(requests, size), window)
    expected = seen_keys(requests, window=window, chunk=None)
    starts = common.query_start_loc.tolist()
    for row, first_token in enumerate(starts[:-1]):
        oldest = min(position for _, position in expected[first_token])
        assert common.block_table[row, 0] == 1 + row * 1000 + oldest // size


ORDERS = (Asked(0, 4096, 1), Asked(2048, 2048, 0), *(Asked(1000 + 37 * i, 1, 1) for i in range(6)))
"""A prompt that ends in this step, one that goes on, and six requests that decode."""


def test_fast_prefill_first_builds_fewer_virtual_batches_of_the_same() -> None:
    """The other order is right, too: it makes a batch of every chunk of each prompt, drops nearly all."""
    common, chunk = make_common(ORDERS, size=16), 64
    wanted = np.array(wanted_tokens(ORDERS))
    reduced = fast_prefill(common, wanted)
    assert reduced is not None
    first = chunked_local(reduced, chunk)
    chunks = chunked_local(common, chunk)
    other = fast_prefill(chunks, wanted)
    assert other is not None
    # 4096 / 64 and 2048 / 64 chunks, and one for each decoding request; against one per wanted token.
    assert (chunks.num_requests, first.num_requests) == (64 + 32 + 6, 1 + 6)
    assert told_keys(first, None) == told_keys(other, None)
    assert snapshot(replace(first, block_table=first.seq_lens)) == snapshot(
        replace(other, block_table=other.seq_lens)
    )


@settings(max_examples=60, deadline=None)
@given(requests=requests_of_a_step, size=st.integers(1, 6), blocks_per_chunk=st.integers(1, 4))
def test_either_order_of_fast_prefill_and_runs_sees_the_same(
    requests: list[Asked], size: int, blocks_per_chunk: int
) -> None:
    common, chunk = make_common(requests, size), blocks_per_chunk * size
    wanted = np.array(wanted_tokens(requests), dtype=np.int64)
    reduced = fast_prefill(common, wanted)
    other = fast_prefill(chunked_local(common, chunk), wanted)
    assert (reduced is None) == (other is None)
    assume(reduced is not None)
    first = chunked_local(reduced, chunk)
    assert told_keys(first, None) == told_keys(other, None)
    assert first.num_requests == other.num_requests <= chunked_local(common, chunk).num_requests


def test_a_window_before_runs_would_be_wrong() -> None:
    """Why sliding_window comes last: a cut table counts from another position."""
    requests = (Asked(20, 1),)
    common = make_common(requests, size=4)
    expected = seen_keys(requests, window=6, chunk=16)
    assert told_keys(sliding_window(chunked_local(common, 16), 6), 6) == expected
    assert told_keys(chunked_local(sliding_window(common, 6), 16), 6) != expected
