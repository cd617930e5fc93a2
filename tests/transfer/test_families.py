"""The byte oracle for every kind of field and mix of kinds: live bytes arrive, no others are written."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from rayk.kv.geometry import layout_veto
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.transfer.plan import BlockReads, plan_transfer
from tests.markers import thorough
from tests.transfer.cluster import Engine, Shape, Values, local_pair, make_caches
from tests.transfer.families import FAMILIES

TPS = list(itertools.product((1, 2, 3, 4, 6, 8), repeat=2))
BLOCKS = [(4, 4), (4, 8), (12, 4), (6, 4)]
STATES = [(64, 64), (16, 64), (100, 8), (7, 16)]
OTHER_POISON = 0x33
"""Of the consumer: what the producer's poison overwrites shows."""


@cache
def layout_pairs(family: str) -> list[tuple[str, str]]:
    """All pairs of layouts that can hold the family."""
    groups = group_layers(FAMILIES[family](4, 64))
    names = [name for name, layout in LAYOUTS.items() if layout_veto(groups, layout) is None]
    return list(itertools.product(names, repeat=2))


def byte_indices(reads: BlockReads) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination address of every byte the reads copy, each [blocks, bytes]."""
    p, runs = reads.pattern, reads.pattern.runs
    within = np.arange(runs.num_bytes) - np.repeat(np.cumsum(runs.lengths) - runs.lengths, runs.lengths)
    return tuple(
        blocks[:, None] * np.repeat(strides, runs.lengths) + np.repeat(starts, runs.lengths) + within
        for blocks, strides, starts in (
            (reads.source_blocks, p.source_strides, runs.source),
            (reads.destination_blocks, p.destination_strides, runs.destination),
        )
    )


def copy(producer: Engine, consumer: Engine, values: Values, source_tables, tables) -> list[np.ndarray]:
    """Carry out every consumer rank's plan byte by byte; how often each of its bytes was written."""
    counts = []
    for caches in consumer.caches:
        plan = plan_transfer([c.geometry for c in producer.caches], caches.geometry)
        pages = caches.buffer.numpy()
        written = np.zeros(caches.geometry.pages_bytes, dtype=np.int8)
        for reads in plan.lower(values.num_tokens, source_tables, tables):
            source, destination = byte_indices(reads)
            pages[destination] = producer.caches[reads.producer_rank].buffer.numpy()[source]
            np.add.at(written, destination, 1)
        counts.append(written)
    return counts


def own_rows(engine: Engine, tables: list[list[int]]) -> list[np.ndarray]:
    """Which bytes of each rank's pages are rows of the request's blocks, by writing through the views."""
    marked = make_caches(engine.shape, engine.side, poison=0)
    for rank, caches in enumerate(marked.caches):
        for group in marked.groups():
            ratio = caches.geometry.groups[group.index].kernel_blocks_per_block
            blocks = [b * ratio + i for b in tables[group.index] if b for i in range(ratio)]
            for layer in group.layers:
                for seen in marked.views(rank, group, layer):
                    ones = torch.full_like(seen.view[blocks], 0, dtype=torch.uint8).repeat_interleave(
                        seen.view.element_size(), dim=-1
                    )
                    seen.view[blocks] = (ones + 1).contiguous().view(seen.view.dtype)
    return [c.buffer[: c.geometry.pages_bytes].numpy() == 1 for c in marked.caches]


def check_copy(shape: Shape, num_tokens: int, seed: int = 0) -> None:
    """Live rows are right; every byte is written once at most, and only rows of the request's blocks are."""
    producer, consumer = make_caches(shape, 0), make_caches(shape, 1, OTHER_POISON)
    values = shape.values(num_tokens, seed)
    source_tables, tables = producer.tables(num_tokens, seed), consumer.tables(num_tokens, seed)
    producer.write(values, source_tables)
    counts = copy(producer, consumer, values, source_tables, tables)
    consumer.check(values, tables)
    for rank, (count, own) in enumerate(zip(counts, own_rows(consumer, tables), strict=True)):
        assert count.max() == 1, f"rank {rank}: a byte is written twice"
        assert not count[~own].any(), f"rank {rank}: bytes outside the request's blocks are written"
        pages = consumer.caches[rank].buffer.numpy()[: len(count)]
        assert np.all(pages[count == 0] == OTHER_POISON)


def dealt(family: str, tp: tuple[int, int], index: int) -> Shape:
    """Layouts, block sizes and state block sizes dealt over cases, each in its own rhythm."""
    pairs = layout_pairs(family)
    step = math.isqrt(len(pairs)) + 1  # without a factor in common with the number of pairs
    return Shape(
        family=family,
        tp=tp,
        layouts=pairs[index * step % len(pairs)],
        block_sizes=BLOCKS[index % 4],
        state_block_sizes=STATES[index // 2 % 4],
        kernel_block_sizes=((None, 2), (2, None), (None, None))[index % 3],
        num_blocks=(60, 70),
    )


def half(family: str) -> list[tuple[int, Shape]]:
    """Every other TP pair; the next family takes the others."""
    offset = list(FAMILIES).index(family)
    tps = [tp for i, tp in enumerate(TPS) if (i + i // 6 + offset) % 2]
    return [(i, dealt(family, tp, i + offset)) for i, tp in enumerate(tps)]


def test_the_sweep_covers_what_it_says():
    covered: dict[str, set[tuple[int, int]]] = {"attention": set(), "state": set()}
    for family in FAMILIES:
        cases = [shape for _, shape in half(family)]
        for part in {part for _, part in cases[0].specs(0)}:
            covered[part] |= {shape.tp for shape in cases}
        for side in (0, 1):
            assert {s.layouts[side] for s in cases} == {pair[0] for pair in layout_pairs(family)}
            assert {s.tp[side] for s in cases} == {1, 2, 3, 4, 6, 8}
    assert covered == {"attention": set(TPS), "state": set(TPS)}
    # Groups of one shape: LHBNC, too.
    assert {len(layout_pairs(family)) for family in ("mamba2", "deepseek_v3")} == {len(LAYOUTS) ** 2}
    assert {len(layout_pairs(family)) for family in ("jamba", "falcon_h1")} == {(len(LAYOUTS) - 1) ** 2}


@thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_tp_pairs_even_and_uneven(family: str):
    """Every layout on each side, blocks and state blocks of unlike sizes."""
    for i, shape in half(family):
        check_copy(shape, num_tokens=(37, 9, 64, 1)[i % 4], seed=i)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_at_every_tp_and_layout_pair(family: str):
    for i, (tp, layouts) in enumerate(itertools.product(TPS, layout_pairs(family))):
        case = dealt(family, tp, i)
        check_copy(Shape(**{**case.__dict__, "layouts": layouts}), num_tokens=(37, 9, 64, 1)[i % 4], seed=i)


@pytest.mark.parametrize("tp", list(itertools.product((1, 2, 4), repeat=2)), ids=lambda t: f"{t[0]}to{t[1]}")
def test_one_group_of_b_and_c_at_every_tp_pair(tp: tuple[int, int]):
    """Every rank holds B and C whole, wherever they come from."""
    start = (tp[0] + 2 * tp[1]) % 3
    for i, layouts in enumerate(layout_pairs("mamba2-1-group")[start::3]):
        shape = Shape(
            family="mamba2-1-group",
            tp=tp,
            layouts=layouts,
            state_block_sizes=STATES[i % 4],
            num_blocks=(12, 14),
        )
        check_copy(shape, num_tokens=37, seed=i)


def test_states_whose_blocks_are_as_long_as_no_sequence():
    """Without a limit of positions a request has one block of states; the other side's may be short."""
    shape = Shape(
        family="falcon_h1",
        tp=(2, 1),
        layouts=("BHLNC", "BLNHC"),
        state_block_sizes=(2**40 - 1, 7),
        num_blocks=(60, 70),
    )
    check_copy(shape, num_tokens=37)
    check_copy(Shape(**{**shape.__dict__, "state_block_sizes": (1, 2**40)}), num_tokens=37)


LIVE_TPS = [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (3, 2), (4, 6), (8, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_arrives_verified(family: str):
    """Whole engines on local agents: handshake, reads, fences; the digests of both sides agree."""
    offset = list(FAMILIES).index(family)
    for i, tp in enumerate(LIVE_TPS[offset % 2 :: 2]):
        shape = dealt(family, tp, 5 * i + offset)
        pair = local_pair(shape, delay_polls=1)
        values = shape.values(37, seed=i)
        outcomes, tables = pair.transfer(values, seed=i)
        assert [o.error for o in outcomes.values()] == [None] * tp[1]
        pair.consumer.check_all(values, tables)
        source_tables = pair.producer.tables(37, seed=i)
        assert pair.producer.tables(37, seed=i) != tables
        for rank, outcome in outcomes.items():
            live = sum(
                right.numel() * right.element_size()
                for at, _, _, _, right in pair.consumer.slots(tables, values)
                if at == rank
            )
            assert outcome.num_bytes_checked == live
            assert sum(r.bytes for r in outcome.rows) >= live
        # Another request's content has other digests.
        pair.producer.write(shape.values(37, seed=99), source_tables)
        ours, theirs = (
            e.digests(37, t) for e, t in ((pair.consumer, tables), (pair.producer, source_tables))
        )
        assert len(ours[0]) == len(theirs[0])
        assert not (np.stack(ours).sum(0) == np.stack(theirs).sum(0)).any()
        assert pair.released() == [["lease-r"]] * tp[0]


def test_equal_content_has_equal_words_whatever_shards_layouts_and_blocks():
    """Zero where a rank holds nothing; over all ranks the same vector."""
    words = []
    for tp, layout, block, state in (
        ((1, 1), "BHLNC", 4, 64),
        ((3, 3), "LBNHC", 12, 16),
        ((1, 3), "BLNHC", 8, 7),
    ):
        shape = Shape(
            family="mamba2",
            tp=tp,
            layouts=(layout, layout),
            block_sizes=(block,) * 2,
            state_block_sizes=(state, state),
        )
        pair = local_pair(shape)
        values = shape.values(300)
        tables = pair.producer.tables(300)
        pair.producer.write(values, tables)
        found = np.stack(pair.producer.digests(300, tables))
        words.append(found)
    units = 24 + 8 + 8 + 24
    assert words[0].shape == (1, 2 * units)
    # 8 groups on 3 ranks of 8 heads: ranks share groups, whose words are equal where they are not zero.
    num_holders = (words[1] != 0).sum(0)
    assert set(num_holders.tolist()) == {1, 2}
    for row in words[1]:
        assert np.array_equal(row[row != 0], words[0][0][row != 0])
    assert np.array_equal(words[0], words[2])
