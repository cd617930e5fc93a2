"""The longest prefix that may be kept, against trying every length row by row."""

from __future__ import annotations

import random

from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, Mamba1Spec, SlidingWindowSpec
from rayk.transfer.valid_prefix import LayerProof, longest_valid_prefix, proven_rows

HEADS = {"num_kv_heads": 2, "num_query_heads": 2, "head_size_k": 8, "head_size_v": 8}
SPECS: tuple[KVCacheSpec, ...] = (
    FullAttentionSpec(block_size=4, dtype="float32", **HEADS),
    SlidingWindowSpec(block_size=4, dtype="float32", window=5, **HEADS),
    ChunkedLocalSpec(block_size=4, dtype="float32", chunk=6, **HEADS),
    Mamba1Spec(block_size=64, dtype="float32", conv_width=4, num_channels=8, state_size=4),
)


def ranges(positions: set[int], stop: int) -> tuple[range, ...]:
    """Runs of positions below `stop`."""
    found: list[range] = []
    for position in sorted(p for p in positions if p < stop):
        if found and found[-1].stop == position:
            found[-1] = range(found[-1].start, position + 1)
        else:
            found.append(range(position, position + 1))
    return tuple(found)


def test_longest_valid_prefix_by_trying_all():
    draw = random.Random(1)
    lengths = set()
    for _ in range(2000):
        num_tokens, num_ranks = draw.randrange(1, 30), draw.randrange(1, 3)
        chosen = draw.sample(SPECS, draw.randrange(1, 4))
        groups = [KVCacheGroup(i, spec, (2 * i, 2 * i + 1), 2) for i, spec in enumerate(chosen)]
        # Rarely a hole, so that something is left.
        proven = {
            (rank, group.index, layer): {p for p in range(num_tokens) if draw.random() < 0.97}
            for rank in range(num_ranks)
            for group in groups
            for layer in group.layers
        }
        proofs = [
            [
                LayerProof(g, layer, ranges(rows, num_tokens))
                for (r, g, layer), rows in proven.items()
                if r == rank
            ]
            for rank in range(num_ranks)
        ]
        expected = max(
            n
            for n in range(num_tokens + 1)
            if n == 0 or all(set(groups[g].spec.live_rows(n)) <= rows for (_, g, _), rows in proven.items())
        )
        assert longest_valid_prefix(groups, proofs, num_tokens) == expected
        lengths.add((expected > 0) + (expected == num_tokens))
    assert lengths == {0, 1, 2}, "nothing, something and everything is valid somewhere"


def test_a_cache_that_no_rank_speaks_of_is_not_proven():
    groups = [KVCacheGroup(0, SPECS[0], (0, 1), 2)]
    whole = [LayerProof(0, 0, (range(8),)), LayerProof(0, 1, (range(8),))]
    assert longest_valid_prefix(groups, [whole, whole], 8) == 8
    assert longest_valid_prefix(groups, [whole[:1], whole[:1]], 8) == 0
    assert longest_valid_prefix(groups, [whole, []], 8) == 0, "a rank that says nothing proves nothing"


def test_ranks_prove_the_layers_that_they_keep():
    groups = [KVCacheGroup(0, SPECS[0], (0, 1), 2)]
    stages = [[LayerProof(0, 0, (range(8),))], [LayerProof(0, 1, (range(5),))]]
    assert longest_valid_prefix(groups, stages, 8) == 5


def test_rows_outside_wrong_digest_groups_are_proven():
    draw = random.Random(2)
    for _ in range(500):
        start, size = draw.randrange(20), draw.randrange(1, 9)
        live = range(start, start + draw.randrange(30))
        wrong = {draw.randrange(60 // size) for _ in range(draw.randrange(3))}
        expected = {p for p in live if p // size not in wrong}
        assert {p for rows in proven_rows(live, size, wrong) for p in rows} == expected
