"""Specs against their definitions: fields, live rows, and the most blocks a window can touch."""

from __future__ import annotations

import numpy as np
import pytest

from rayk.kv.fields import ITEMSIZE, PageField
from rayk.kv.specs import max_live_blocks, page_bytes
from rayk.types.errors import Unsupported
from tests.kv.brute import brute_units, full, sliding


def test_fields_in_global_units():
    spec = full(block_size=16, kv_heads=4, head_k=8, head_v=6, dtype="bfloat16", query_heads=32)
    assert spec.fields() == (
        PageField("k", units=4, rows=16, row_bytes=16, dtype="bfloat16", readers=32),
        PageField("v", units=4, rows=16, row_bytes=12, dtype="bfloat16", readers=32),
    )
    assert page_bytes(spec) == 4 * 16 * (8 + 6) * 2
    assert [f.unit_bytes for f in spec.fields()] == [256, 192]
    assert [f.canonical_bytes for f in spec.fields()] == [1024, 768]
    assert sliding(9, spec).fields() == spec.fields()
    assert (spec.kind, sliding(9, spec).kind) == ("full", "sliding")


def test_itemsizes_are_torch_ones():
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
    assert ITEMSIZE["float16"] == np.dtype("float16").itemsize


def test_specs_of_unlike_kinds_are_unlike():
    """Layers group by equality: a window is part of what a layer keeps, and so is its class."""
    assert len({full(), full(), sliding(3), sliding(3), sliding(4)}) == 3


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6, 12])
def test_shard_of_a_field(kv_heads: int, tp_size: int):
    spec = full(kv_heads=kv_heads)
    for tp_rank in range(tp_size):
        for field in spec.fields():
            assert list(field.shard(tp_size, tp_rank)) == brute_units(spec, tp_size, tp_rank)


def test_shard_refuses_what_the_model_cannot_run():
    with pytest.raises(Unsupported):
        full(query_heads=12).fields()[0].shard(8, 0)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 50])
def test_live_rows_are_what_a_later_token_sees(window: int):
    """Attention as DESIGN's kernels define it: a query at q sees keys k with q - window < k <= q."""
    for num_tokens in range(70):
        seen = [
            k for k in range(num_tokens) if any(q - window < k for q in range(num_tokens, num_tokens + 70))
        ]
        assert list(sliding(window).live_rows(num_tokens)) == seen
        assert list(full().live_rows(num_tokens)) == list(range(num_tokens))


@pytest.mark.parametrize(("window", "blocks"), [(2048, 129), (512, 33)])
def test_published_window_block_counts(window: int, blocks: int):
    """FIXTURES: blocks exchanged for a sliding window at block size 16, at most."""
    spec = sliding(window, full(block_size=16))
    assert max_live_blocks(spec, 10**6) == blocks
    touched = [len({row // 16 for row in spec.live_rows(n)}) for n in range(3 * window)]
    assert max(touched) == blocks


@pytest.mark.parametrize("block_size", [1, 2, 4, 5])
@pytest.mark.parametrize("window", [2, 3, 4, 5, 9, 13])
@pytest.mark.parametrize("num_new", [0, 1, 2, 7])
def test_most_blocks_is_the_maximum_over_all_places(block_size: int, window: int, num_new: int):
    spec = sliding(window, full(block_size=block_size))
    enough = window + num_new + 3 * block_size
    for max_tokens in range(1, enough):
        most = 0
        for start in range(max_tokens + 1):
            live = spec.live_rows(start)
            rows = range(live.start, min(start + num_new, max_tokens))
            most = max(most, len({row // block_size for row in rows}))
        assert max_live_blocks(spec, max_tokens, num_new) >= most
        if max_tokens == enough - 1:
            assert max_live_blocks(spec, max_tokens, num_new) == most
        assert max_live_blocks(full(block_size=block_size), max_tokens, num_new) == -(
            -max_tokens // block_size
        )
