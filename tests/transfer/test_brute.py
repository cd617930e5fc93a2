"""The plan of every kind of field against memory laid down by definition (tests/kv/brute.py): neither side's
addresses come from rayk.kv."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import KVCacheSpec
from rayk.transfer.plan import consecutive_tables, plan_transfer
from tests.kv.brute import (
    Case,
    Ints,
    brute_addresses,
    brute_bundles,
    brute_rows,
    full,
    gdn,
    mamba1,
    mamba2,
    mla,
    sliding,
)
from tests.transfer.brute import UNKNOWN
from tests.transfer.test_families import byte_indices

NUM_TOKENS = 11
Kept = dict[int, KVCacheSpec | tuple[KVCacheSpec, ...]]
Content = dict[tuple[int, str], Ints]
"""(layer, field) -> a number for each [unit, token, byte], unlike all others."""

MIXES: dict[str, tuple[Callable[[int, int], Kept], tuple[int, ...]]] = {
    "latent": (lambda block, state: {0: mla(block), 2: mla(block)}, (1, 2, 3, 4)),
    "channels": (lambda block, state: {0: mamba1(state, 96), 1: mamba1(state, 96)}, (1, 2, 3, 6)),
    "one-group-of-b-and-c": (
        lambda block, state: {0: mamba2(1, 12, state), 1: mamba2(1, 12, state)},
        (1, 2, 4),
    ),
    "two-groups-of-b-and-c": (lambda block, state: {0: mamba2(2, 12, state)}, (1, 2, 3, 4, 6)),
    "eight-groups-of-b-and-c": (lambda block, state: {0: mamba2(8, 24, state)}, (1, 3, 4, 6, 8)),
    "delta": (lambda block, state: {0: gdn(state), 1: gdn(state)}, (1, 2, 3, 6)),
    "attention-beside-heads": (
        lambda block, state: {
            0: (full(block), mamba2(2, 6, state)),
            1: (sliding(5, full(block)), mamba2(2, 6, state)),
        },
        (1, 2, 3, 6),
    ),
    "latent-and-delta": (lambda block, state: {0: mla(block), 1: gdn(state), 2: gdn(state)}, (1, 2, 3)),
}
"""What layers keep, for tokens per block of attention and of states, and the TP sizes that divide it."""

CASES = [
    (name, tp)
    for name, (_, sizes) in MIXES.items()
    for tp in itertools.product(sizes, repeat=2)
    if tp != (1, 1)
]


def number(case: Case) -> Content:
    """Of the whole model; every byte a number of its own."""
    content: Content = {}
    start = 0
    for g in case.groups:
        for layer, piece in itertools.product(g.layers, itertools.chain(*brute_bundles(g.spec))):
            shape = (piece.num_units, NUM_TOKENS, piece.row_bytes)
            size = int(np.prod(shape))
            content[layer, piece.name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
            start += size
    return content


def live_tokens(g: KVCacheGroup) -> list[int]:
    """Whose rows matter, by what the kinds are for."""
    if g.spec.part == "state":
        return [NUM_TOKENS - 1]
    window = getattr(g.spec, "window", NUM_TOKENS + 1)
    return [t for t in range(NUM_TOKENS) if t > NUM_TOKENS - window]


def fill(case: Case, layout: str, tp_rank: int, content: Content, tables: list[list[int]], size: int) -> Ints:
    """A rank's pages, holding what is live."""
    pages = np.full(size, UNKNOWN, dtype=np.int64)
    for g, places in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        block_size, kernel = g.spec.block_size, case.kernel_rows(g)
        ratio = brute_rows(g.spec) // kernel
        units = {p.name: p.units(case.tp_size, tp_rank) for p in itertools.chain(*brute_bundles(g.spec))}
        for token in live_tokens(g):
            row = 0 if g.spec.part == "state" else token % block_size
            block = tables[g.index][token // block_size] * ratio + row // kernel
            for (name, addresses), (position, layer) in itertools.product(
                places.items(), enumerate(g.layers)
            ):
                pages[addresses[position, block, :, row % kernel]] = content[layer, name][units[name], token]
    return pages


def check(name: str, tp: tuple[int, int], index: int) -> None:
    """Each consumer rank's pages, whole, after its plan."""
    make, _ = MIXES[name]
    sizes = ((4, 50), (4, 3), (6, 50), (2, 7))
    sides = [
        Case(
            f"{name} {side}",
            make(*sizes[(index + side) % 4]),
            tp[side],
            (None, 2)[(index + side) % 2],
            num_blocks=24,
        )
        for side in (0, 1)
    ]
    layouts = [n for n in LAYOUTS if n != "LHBNC" or not sides[0].is_unlike]
    pairs = list(itertools.product(layouts, repeat=2))
    chosen = pairs[index * 7 % len(pairs)]
    producers, consumers = (
        [case.rank(layout, rank) for rank in range(case.tp_size)]
        for case, layout in zip(sides, chosen, strict=True)
    )
    content = number(sides[0])
    source_tables, tables = (
        consecutive_tables(producers[0], NUM_TOKENS),
        consecutive_tables(consumers[0], NUM_TOKENS),
    )
    tables = [[b and 24 - b for b in table] for table in tables]
    sources = [fill(sides[0], chosen[0], p.tp_rank, content, source_tables, p.pages_bytes) for p in producers]
    for consumer in consumers:
        landed = np.full(consumer.pages_bytes, UNKNOWN, dtype=np.int64)
        counts = np.zeros(consumer.pages_bytes, dtype=np.int64)
        for reads in plan_transfer(producers, consumer).lower(NUM_TOKENS, source_tables, tables):
            source, destination = byte_indices(reads)
            landed[destination] = sources[reads.producer_rank][source]
            np.add.at(counts, destination, 1)
        expected = fill(sides[1], chosen[1], consumer.tp_rank, content, tables, consumer.pages_bytes)
        np.testing.assert_array_equal(landed, expected)
        assert counts.max() == 1


@pytest.mark.parametrize("name", MIXES)
def test_every_kind_lands_where_its_definition_says(name: str) -> None:
    for index, (_, tp) in enumerate(c for c in CASES if c[0] == name):
        check(name, tp, index + list(MIXES).index(name))


def test_uneven_pairs_are_among_them() -> None:
    assert {(3, 2), (2, 3), (4, 6), (6, 4), (3, 4), (8, 6)} <= {tp for _, tp in CASES}
    assert len(CASES) == 15 + 15 + 8 + 24 + 24 + 15 + 15 + 8
