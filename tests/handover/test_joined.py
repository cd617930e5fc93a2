"""Captured rows of engines that divide tokens and layers, against rows cut by walking through the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rayk.handover.commands import Captured
from rayk.handover.joined import join_ranks
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import FullAttentionSpec, Mamba2Spec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape, Stripe

GROUPS = [
    KVCacheGroup(0, FullAttentionSpec(4, 1, 2, 2, "float32", 8), (0, 3), 2),
    KVCacheGroup(1, SlidingWindowSpec(4, 1, 2, 2, "float32", 8, 6), (1,), 2),
    KVCacheGroup(2, Mamba2Spec(64, "float32", 4, 8, 4, 2, 8), (2,), 2),
]
NUM_TOKENS = 17
DIVIDED = [
    EngineShape(2, 2),
    EngineShape(4, 2, 2, (1, 3)),
    EngineShape(2, stages=(2, 1, 1)),
    EngineShape(3, 3, 4),
]


def whole(tp: int) -> list[dict]:
    """What tensor-parallel ranks alone would show: tokens of all, states of their own."""
    draw = np.random.default_rng(0)
    shared = {
        (layer, name): draw.integers(0, 256, (len(group.spec.live_rows(NUM_TOKENS)), 8), dtype=np.uint8)
        for group in GROUPS
        for layer in group.layers
        for name in ("k", "v")
    }
    own = [draw.integers(0, 256, (1, 8), dtype=np.uint8) for _ in range(tp)]
    return [
        {
            n: {("ssm", rank): own[rank]} if n == 2 else {(name, 0): shared[n, name] for name in ("k", "v")}
            for n in range(4)
        }
        for rank in range(tp)
    ]


@pytest.mark.parametrize("shape", [EngineShape(2), *DIVIDED], ids=str)
def test_rows_are_joined_in_the_order_of_their_tokens(shape: EngineShape) -> None:
    expected = whole(shape.tp)
    stage_of = [s for s, count in enumerate(shape.stages or (4,)) for _ in range(count)]
    captured = []
    for rank in range(shape.num_ranks):
        tp_rank, stage = rank % shape.tp, shape.pp - 1 - rank // shape.tp
        rows = {}
        for group in GROUPS:
            live = group.spec.live_rows(NUM_TOKENS)
            mine = [
                i for i, t in enumerate(live) if t // shape.dcp_interleave % shape.dcp == tp_rank % shape.dcp
            ]
            for layer in (n for n in group.layers if stage_of[n] == stage):
                of = expected[tp_rank][layer]
                rows[layer] = of if layer == 2 else {key: values[mine] for key, values in of.items()}
        tokens = Stripe(shape.dcp, tp_rank % shape.dcp, shape.dcp_interleave)
        captured.append(Captured(rows, dict.fromkeys(rows.keys() - {2}, tokens)))
    found = join_ranks(captured, GROUPS, shape, NUM_TOKENS)
    assert len(found) == shape.tp
    for joined, right in zip(found, expected, strict=True):
        assert sorted(joined) == sorted(right)
        for layer, rows in right.items():
            assert joined[layer].keys() == rows.keys()
            assert all(np.array_equal(joined[layer][key], rows[key]) for key in rows)
