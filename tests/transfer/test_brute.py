"""The plan of every kind of field against memory laid down by definition (tests/kv/brute.py): neither side's
addresses come from rayk.kv."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rayk.kv.geometry import RankGeometry
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import KVCacheSpec
from rayk.transfer import plan as plan_module
from rayk.transfer.plan import consecutive_tables, plan_transfer
from tests.kv.brute import (
    Case,
    Ints,
    brute_addresses,
    brute_bundles,
    brute_rows,
    chunked,
    full,
    gdn,
    mamba1,
    mamba2,
    mla,
    sliding,
)
from tests.markers import thorough
from tests.transfer.brute import UNKNOWN
from tests.transfer.test_families import byte_indices

pytestmark = thorough

SIZES = ((4, 50), (4, 3), (6, 50), (2, 7))
"""Tokens per block of attention, and of states."""
LARGE = ((64, 200), (48, 30), (80, 7), (32, 200))
"""Blocks that are worth a cut."""
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
    # Runs of 13: two are over at 26 tokens, and nothing of the chunked layers lives.
    "chunks-beside-full": (
        lambda block, state: {0: chunked(13, full(block)), 1: full(block)},
        (1, 2, 3, 4),
    ),
    # Layers 1, 4 and 5 use the pages of others.
    "chunks-that-share": (
        lambda block, state: {
            0: chunked(5, full(block)),
            2: (chunked(7, full(block)), mamba2(2, 6, state)),
            3: sliding(5, full(block)),
        },
        (1, 2, 6),
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


def number(case: Case, num_tokens: int) -> Content:
    """Of the whole model; every byte a number of its own."""
    content: Content = {}
    start = 0
    for g in case.groups:
        for layer, piece in itertools.product(g.layers, itertools.chain(*brute_bundles(g.spec))):
            shape = (piece.num_units, num_tokens, piece.row_bytes)
            size = int(np.prod(shape))
            content[layer, piece.name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
            start += size
    return content


def live_tokens(g: KVCacheGroup, num_tokens: int) -> list[int]:
    """Whose rows matter, by what the kinds are for."""
    if g.spec.part == "state":
        return [num_tokens - 1]
    window, chunk = getattr(g.spec, "window", num_tokens + 1), getattr(g.spec, "chunk", num_tokens + 1)
    return [t for t in range(num_tokens) if t > num_tokens - window and t // chunk == num_tokens // chunk]


def fill(
    case: Case, layout: str, rank: RankGeometry, content: Content, tables: list[list[int]], num_tokens: int
) -> Ints:
    """A rank's pages, holding what is live."""
    pages = np.full(rank.pages_bytes, UNKNOWN, dtype=np.int64)
    tp_rank = rank.tp_rank
    for g, places in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        block_size, kernel = g.spec.block_size, case.kernel_rows(g)
        ratio = brute_rows(g.spec) // kernel
        units = {p.name: p.units(case.tp_size, tp_rank) for p in itertools.chain(*brute_bundles(g.spec))}
        for token in live_tokens(g, num_tokens):
            row = 0 if g.spec.part == "state" else token % block_size
            block = tables[g.index][token // block_size] * ratio + row // kernel
            for (name, addresses), (position, layer) in itertools.product(
                places.items(), enumerate(g.layers)
            ):
                pages[addresses[position, block, :, row % kernel]] = content[layer, name][units[name], token]
    return pages


def check(
    name: str,
    tp: tuple[int, int],
    index: int,
    num_tokens: int = 11,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> float:
    """Each consumer rank's pages, whole, after its plan; bytes moved over bytes needed."""
    make, _ = MIXES[name]
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
    layouts = [n for n in LAYOUTS if all(side.fits(n) for side in sides)]
    pairs = list(itertools.product(layouts, repeat=2))
    chosen = pairs[index * 7 % len(pairs)]
    producers, consumers = (
        [case.rank(layout, rank) for rank in range(case.tp_size)]
        for case, layout in zip(sides, chosen, strict=True)
    )
    content = number(sides[0], num_tokens)
    source_tables, tables = (consecutive_tables(side[0], num_tokens) for side in (producers, consumers))
    tables = [[b and 24 - b for b in table] for table in tables]
    sources = [fill(sides[0], chosen[0], p, content, source_tables, num_tokens) for p in producers]
    moved = needed = 0
    for consumer in consumers:
        landed = np.full(consumer.pages_bytes, UNKNOWN, dtype=np.int64)
        counts = np.zeros(consumer.pages_bytes, dtype=np.int64)
        for reads in plan_transfer(producers, consumer).lower(num_tokens, source_tables, tables):
            source, destination = byte_indices(reads)
            landed[destination] = sources[reads.producer_rank][source]
            np.add.at(counts, destination, 1)
        expected = fill(sides[1], chosen[1], consumer, content, tables, num_tokens)
        np.testing.assert_array_equal(landed, expected)
        assert counts.max() == 1
        moved += int(counts.sum())
        needed += int((expected != UNKNOWN).sum())
    return moved / needed


@pytest.mark.parametrize("name", MIXES)
def test_every_kind_lands_where_its_definition_says(name: str) -> None:
    for index, (_, tp) in enumerate(c for c in CASES if c[0] == name):
        check(name, tp, index + list(MIXES).index(name), num_tokens=(11, 1, 26)[index % 3])


@pytest.mark.parametrize("name", ["latent", "attention-beside-heads", "chunks-beside-full"])
def test_segments_cut_to_their_live_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 to 80 tokens, cut wherever that moves less: at multiples of 16 tokens."""
    cases = [tp for mix, tp in CASES if mix == name]
    for index, tp in list(enumerate(cases))[:: len(cases) // 5]:
        num_tokens = (5, 40, 85)[index % 3]
        monkeypatch.setattr(plan_module, "BLOCK_COST_BYTES", 0)
        cut = check(name, tp, index, num_tokens, LARGE)
        monkeypatch.setattr(plan_module, "BLOCK_COST_BYTES", 1 << 40)
        assert cut < check(name, tp, index, num_tokens, LARGE)
        if name == "latent":
            assert cut <= -(-num_tokens // 16) * 16 / num_tokens


def test_uneven_pairs_are_among_them() -> None:
    assert {(3, 2), (2, 3), (4, 6), (6, 4), (3, 4), (8, 6)} <= {tp for _, tp in CASES}
    assert len(CASES) == 15 + 15 + 8 + 24 + 24 + 15 + 15 + 15 + 8 + 8
