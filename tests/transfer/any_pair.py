"""Any pair of engines, drawn by hypothesis, and memory laid down by definition to compare their plans with.

Where a byte lies is told by transposing arrays of numbered bytes, which knows no strides; what a cache holds
and which rank needs what comes from tests.kv.brute; what is live from what windows, chunks and states are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

import numpy as np
from hypothesis import strategies as st

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import BLOCK_COST_BYTES, KVCacheGroup, group_layers
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    SlidingWindowSpec,
)
from rayk.parallel.shard import EngineShape
from rayk.transfer.plan import BlockReads
from tests.kv.brute import Ints, Piece, brute_bundles, brute_rows, cuts_blocks
from tests.transfer.brute import UNKNOWN

HEADS = (6, 8, 12, 24)
TP_SIZES = (1, 2, 3, 4, 6, 8)
BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
STATE_BLOCKS = (1, 5, 16, 64, 2**40)
KINDS = ("full", "sliding", "chunked", "mla", "mamba1", "mamba2", "gdn", "full+mamba2", "sliding+gdn")
FORMATS = {
    "int8": (2, 1),
    "float16": (2, 1),
    "float32": (1, 2),
    "fp8_e4m3": (3, 2),
    "fp8_e4m3_token_head": (3, 1),
    "nvfp4": (16, 32),
}
"""Dtype of keys and values -> sizes of their heads."""


@dataclass(frozen=True)
class Side:
    """What one engine chooses for itself."""

    layout: str
    tp: int
    block_size: int
    state_block: int
    kernels_per_block: int
    """Kernel blocks that attention's blocks are cut into."""
    keeps_all: bool
    """Without hybrid_kv."""
    is_scattered: bool
    num_spare_blocks: int
    dcp: int = 1
    interleave: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each stage; () is one of all."""

    @property
    def shape(self) -> EngineShape:
        return EngineShape(self.tp, self.dcp, self.interleave, self.stages)

    @property
    def num_ranks(self) -> int:
        return self.tp * max(1, len(self.stages))

    def owns(self, rank: int, layer: int) -> bool:
        """Whether the layer is of the rank's stage: the last stage's ranks come first."""
        stages = [stage for stage, count in enumerate(self.stages) for _ in range(count)]
        return not stages or stages[layer] == len(self.stages) - 1 - rank // self.tp

    def owned(self, rank: int, part: str, positions: Ints) -> np.ndarray:
        """Which positions are the rank's: all of a state, else those whose run of tokens is its turn."""
        turn = positions // self.interleave % self.dcp
        return (turn == rank % self.tp % self.dcp) | (part == "state")


@dataclass(frozen=True)
class Model:
    """What both engines run."""

    layers: tuple[str, ...]
    heads: int
    kv_heads: int
    state_groups: int
    dtype: str
    window: int
    chunk: int


@dataclass(frozen=True)
class AnyPair:
    """A model, a prompt, and two engines: (producer, consumer)."""

    model: Model
    num_tokens: int
    sides: tuple[Side, Side]
    chunk_ends: tuple[int, ...]
    """Where steps of the producer end, for pushes; empty: there are none."""
    layers_per_write: int
    block_cost: int
    """Bytes that a cut must save: 0 cuts wherever it can."""
    seed: int


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def models(draw: st.DrawFn) -> Model:
    heads = draw(st.sampled_from(HEADS))
    palette = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    layers = draw(st.lists(st.sampled_from(palette), min_size=1, max_size=5))
    local = st.integers(1, 40)
    return Model(
        tuple(layers),
        heads,
        # Ranks can share the tokens of heads that are few.
        kv_heads=draw(st.sampled_from((1, 1, 2, *divisors(heads)))),
        state_groups=draw(st.sampled_from(divisors(heads))),
        dtype=draw(st.sampled_from(tuple(FORMATS))),
        window=draw(local),
        chunk=draw(local),
    )


def token_shards(model: Model, tp: int) -> list[int]:
    """Over how many ranks tokens can be dealt: so many in a row have the same heads of all attention."""
    kinds = {kind for kinds in model.layers for kind in kinds.split("+")}
    counts = {1 if kind == "mla" else model.kv_heads for kind in kinds - {"mamba1", "mamba2", "gdn"}}
    held = [
        {
            (n, reader * n // model.heads)
            for n in counts
            for reader in range(model.heads)
            if reader * tp // model.heads == rank
        }
        for rank in range(tp)
    ]
    return [
        size
        for size in divisors(tp)
        if all(held[rank] == held[rank // size * size] for rank in range(tp)) and counts
    ] or [1]


@st.composite
def stages(draw: st.DrawFn, num_layers: int) -> tuple[int, ...]:
    borders = draw(st.sets(st.integers(1, num_layers - 1), max_size=3)) if num_layers > 1 else set()
    edges = [0, *sorted(borders), num_layers]
    return tuple(b - a for a, b in itertools.pairwise(edges)) if borders else ()


@st.composite
def sides(draw: st.DrawFn, model: Model) -> Side:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    sizes = [tp for tp in TP_SIZES if model.heads % tp == 0]
    deals = [tp for tp in sizes if len(token_shards(model, tp)) > 1]
    tp = draw(st.sampled_from([*sizes, *deals, *deals]))
    shards = token_shards(model, tp)
    side = Side(
        layout=draw(st.sampled_from(tuple(LAYOUTS))),
        tp=tp,
        block_size=block_size,
        state_block=draw(st.sampled_from(STATE_BLOCKS)),
        kernels_per_block=draw(st.sampled_from(divisors(block_size)[:3])),
        keeps_all=draw(st.booleans()),
        is_scattered=draw(st.booleans()),
        num_spare_blocks=draw(st.integers(0, 3)),
        dcp=draw(st.sampled_from([*shards, *shards[1:]])),
        interleave=draw(st.sampled_from(divisors(block_size))),
        stages=draw(stages(len(model.layers))),
    )
    if cuts_blocks(side.layout) and not is_one_shape(groups_of(model, side), side.dcp):
        return replace(side, layout="LBHNC")
    return side


@st.composite
def any_pairs(draw: st.DrawFn) -> AnyPair:
    model = draw(models())
    chosen = draw(sides(model)), draw(sides(model))
    most = min(70, 10 * min(side.block_size * side.dcp for side in chosen))
    sizes = {size for s in chosen for size in (s.block_size, s.block_size * s.dcp, s.interleave)}
    borders = sorted({n for size in sizes for n in (1, size, size + 1) if n <= most})
    borders += [n for n in (model.window, model.chunk) if n <= most]
    num_tokens = draw(st.one_of(st.integers(1, most), st.sampled_from(borders)))
    is_pushed = draw(st.integers(0, 2)) == 0
    ends = draw(st.lists(st.integers(1, num_tokens), max_size=3, unique=True)) if is_pushed else []
    return AnyPair(
        model,
        num_tokens,
        chosen,
        chunk_ends=tuple(sorted({*ends, num_tokens})) if is_pushed else (),
        layers_per_write=draw(st.integers(1, len(model.layers))),
        block_cost=draw(st.sampled_from((0, 100, BLOCK_COST_BYTES))),
        seed=draw(st.integers(0, 1000)),
    )


# --- what layers keep ------------------------------------------------------------------------------


def spec_of(model: Model, kind: str, side: Side, *, keeps_all: bool) -> KVCacheSpec:
    """One cache of a layer."""
    heads, block, state = model.heads, side.block_size, side.state_block
    attention = (block, model.kv_heads, *FORMATS[model.dtype], model.dtype, heads)
    dtype = model.dtype if model.dtype in ("float16", "float32") else "bfloat16"
    match kind:
        case "sliding" if not keeps_all:
            return SlidingWindowSpec(*attention, model.window)
        case "chunked" if not keeps_all:
            return ChunkedLocalSpec(*attention, model.chunk)
        case "full" | "sliding" | "chunked":
            return FullAttentionSpec(*attention)
        case "mla":
            return MlaSpec(block, 3, 2, dtype, heads)
        case "mamba1":
            return Mamba1Spec(state, dtype, conv_width=2, num_channels=16 * heads, state_size=1)
        case "mamba2":
            return Mamba2Spec(state, dtype, 3, heads, 1, model.state_groups, 2)
        case "gdn":
            return GatedDeltaNetSpec(state, dtype, 3, model.state_groups, 1, heads, 2)
    raise AssertionError(kind)


def groups_of(model: Model, side: Side) -> tuple[KVCacheGroup, ...]:
    """As an engine forms them."""
    kept, seen = (
        {
            (layer, spec.part): spec
            for layer, kinds in enumerate(model.layers)
            for kind in kinds.split("+")
            for spec in [spec_of(model, kind, side, keeps_all=keeps_all)]
        }
        for keeps_all in (side.keeps_all, False)
    )
    return group_layers(kept, seen, dcp=side.dcp)


def rank_rows(g: KVCacheGroup, dcp: int) -> int:
    """Rows of a block on one of so many ranks that share tokens."""
    return brute_rows(g.spec) // (1 if g.spec.part == "state" else dcp)


def is_one_shape(groups: Sequence[KVCacheGroup], dcp: int) -> bool:
    """Whether all have the same heads and bytes of a head, on a rank."""
    shapes = {
        tuple(
            (b[0].num_units, b[0].num_readers, sum(p.row_bytes for p in b) * rank_rows(g, dcp))
            for b in brute_bundles(g.spec)
        )
        for g in groups
    }
    return len(shapes) == 1


def live_tokens(model: Model, layer: int, part: str, num_tokens: int) -> Ints:
    """Positions whose rows the next token can see."""
    tokens = np.arange(num_tokens)
    if part == "state":
        return tokens[-1:]
    match model.layers[layer].split("+")[0]:
        case "sliding":
            return tokens[tokens > num_tokens - model.window]
        case "chunked":
            return tokens[tokens // model.chunk == num_tokens // model.chunk]
    return tokens


# --- where it lies ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """One field of one group on one rank."""

    piece: Piece
    units: list[int]
    addresses: Ints
    """[layer, kernel block, unit, row, byte]."""


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(numbers: Ints, multiple: int) -> Ints:
    """The last axis made longer, to a multiple."""
    size = numbers.shape[-1]
    if size % multiple == 0:
        return numbers
    padded = np.full((*numbers.shape[:-1], _round_up(size, multiple)), UNKNOWN, dtype=np.int64)
    padded[..., :size] = numbers
    return padded


def _collapse(numbers: Ints, axes: str, padding: int) -> Ints:
    """The last axes laid one after the other: pages (L) and blocks (B) at multiples of `padding`."""
    for axis in reversed(axes):
        if axis in "LB":
            numbers = _pad(numbers, padding)
        numbers = numbers.reshape(*numbers.shape[:-2], numbers.shape[-2] * numbers.shape[-1])
    return numbers


@dataclass(frozen=True, eq=False)
class _Shape:
    """One group on one rank, before it is fitted into the pool."""

    group: KVCacheGroup
    layout: str
    units: list[list[int]]
    """By bundle."""
    kernel: int
    rows: int
    """Of a block, on the rank."""
    num_layers: int
    num_positions: int

    @cached_property
    def bundles(self) -> list[list[Piece]]:
        return brute_bundles(self.group.spec)

    @property
    def ratio(self) -> int:
        return self.rows // self.kernel

    @property
    def num_pages(self) -> int:
        return self.num_layers if self.layout[0] == "B" else self.num_positions

    @property
    def alignment(self) -> int:
        return 16 if len(self.bundles) > 1 else max(p.itemsize for p in self.bundles[0])

    @property
    def padding(self) -> int:
        return 16 if len(self.bundles) > 1 else 1

    def numbered(self, num_blocks: int, num_layers: int) -> list[Ints]:
        """By bundle, a number for each byte [L, kernel B, H, N, C], all different."""
        found, start = [], 0
        for bundle, units in zip(self.bundles, self.units, strict=True):
            size = sum(p.row_bytes for p in bundle)
            shape = (num_layers, num_blocks * self.ratio, len(units), self.kernel, size)
            found.append(np.arange(start, start + np.prod(shape), dtype=np.int64).reshape(shape))
            start += found[-1].size
        return found

    def lay(self, num_blocks: int, step: int | None) -> Ints:
        """The numbers in the order of memory, UNKNOWN between. `step`: bytes of a block in what lies outside
        of B (None: as they come)."""
        axes = self.layout[:-1]
        cut = min(axes.index("H"), axes.index("N"))
        order = ["LBHN".index(axis) for axis in axes]
        stretches = []
        for numbers in self.numbered(num_blocks, self.num_pages):
            ordered = numbers.transpose(*order, 4)
            stretches.append(_pad(_collapse(ordered, axes[cut:], self.padding), self.padding))
        memory = np.concatenate(stretches, axis=-1)
        outer = axes[:cut]
        if step is None:
            return _collapse(memory, outer, self.padding)
        inside = outer[outer.index("B") + 1 :]
        memory = _pad(_collapse(memory, inside, self.padding), self.padding)
        size = step // self.ratio
        assert memory.shape[-1] <= size, "a block holds every group's"
        return _pad(memory, size).reshape(-1)


def lay_out(
    groups: Sequence[KVCacheGroup], side: Side, rank: int, num_blocks: int, kernels: Sequence[int]
) -> list[dict[str, Place]]:
    """By group, field -> where its bytes lie on a rank."""
    layout = side.layout
    counts = [sum(side.owns(rank, layer) for layer in g.layers) for g in groups]
    positions = max(1, *counts) if side.stages else groups[0].num_positions
    shapes = [
        _Shape(
            g,
            layout,
            [b[0].units(side.tp, rank % side.tp) for b in brute_bundles(g.spec)],
            kernel,
            rank_rows(g, side.dcp),
            count,
            positions,
        )
        for g, kernel, count in zip(groups, kernels, counts, strict=True)
    ]
    step = None if cuts_blocks(layout) else _pool_step(shapes)
    places = []
    for shape in shapes:
        memory = shape.lay(num_blocks, step)
        address_of = np.empty(int(memory.max(initial=-1)) + 1, dtype=np.int64)
        address_of[memory[memory >= 0]] = np.flatnonzero(memory >= 0)
        layers = shape.num_layers
        found: dict[str, Place] = {}
        numbered = shape.numbered(num_blocks, shape.num_pages)
        for bundle, units, numbers in zip(shape.bundles, shape.units, numbered, strict=True):
            start = 0
            for piece in bundle:
                stop = start + piece.row_bytes
                found[piece.name] = Place(piece, units, address_of[numbers[:layers, ..., start:stop]])
                start = stop
        places.append(found)
    return places


def _pool_step(shapes: Sequence[_Shape]) -> int:
    """Bytes of a block (of a page, where layers are outermost): the fewest that hold any group's and that
    every group can cut into whole kernel blocks."""
    needs = []
    for shape in shapes:
        # One kernel block, padded as it is among others.
        axes = shape.layout[:-1]
        cut = min(axes.index("H"), axes.index("N"))
        inside = axes[:cut][axes[:cut].index("B") + 1 :]
        layers = shape.num_layers if inside or axes[0] == "B" else 1
        order = ["LBHN".index(axis) for axis in axes]
        parts = [
            _pad(
                _collapse(n[:, :1].transpose(*order, 4), axes[cut:], shape.padding),
                shape.padding,
            )
            for n in shape.numbered(1, layers)
        ]
        memory = np.concatenate(parts, axis=-1)
        memory = _pad(_collapse(memory, inside, shape.padding), shape.padding)
        needs.append(memory.shape[-1] * shape.ratio)
    return _round_up(max(1, *needs), lcm(*(shape.ratio * shape.alignment for shape in shapes)))


# --- engines ---------------------------------------------------------------------------------------

Content = Mapping[tuple[int, str, str], Ints]
"""(layer, part, field) -> a number for each [unit, token, byte], unlike all others."""


def number(model: Model, groups: Sequence[KVCacheGroup], num_tokens: int) -> Content:
    """Of the whole model. A state has one row: that of the last token."""
    content: dict[tuple[int, str, str], Ints] = {}
    start = 0
    for g in groups:
        for (layer, part), piece in itertools.product(g.keys, list(itertools.chain(*brute_bundles(g.spec)))):
            shape = (piece.num_units, 1 if part == "state" else num_tokens, piece.row_bytes)
            size = int(np.prod(shape))
            content[layer, part, piece.name] = np.arange(start, start + size).reshape(shape)
            start += size
    return content


class Engine:
    """One side of a pair: its ranks as rayk plans them, and where their bytes lie by definition."""

    def __init__(self, case: AnyPair, index: int) -> None:
        self.case, self.side = case, case.sides[index]
        side, num_tokens = self.side, case.num_tokens
        self.groups = groups_of(case.model, side)
        kernel = side.block_size // side.kernels_per_block
        self.kernels = [kernel if g.spec.part == "attention" else 1 for g in self.groups]
        blocks_per_group = [self._num_kept_blocks(g) for g in self.groups]
        self.num_blocks = max(2, 1 + sum(blocks_per_group) + side.num_spare_blocks)
        ids = np.arange(1, self.num_blocks)
        if side.is_scattered:
            ids = np.random.default_rng(case.seed + index).permutation(ids)
        self.tables: list[list[int]] = []
        start = 0
        for g, count in zip(self.groups, blocks_per_group, strict=True):
            trimmed = -(-num_tokens // g.spec.block_size) - count
            self.tables.append([0] * trimmed + ids[start : start + count].tolist())
            start += count
        self.ranks: list[RankGeometry] = [
            plan_rank(
                self.groups,
                LAYOUTS[side.layout],
                shape=side.shape,
                rank=rank,
                num_blocks=self.num_blocks,
                kernel_block_sizes=kernel_block_sizes(self.groups, kernel, {}, dcp=side.dcp),
            )
            for rank in range(side.num_ranks)
        ]
        self.places = [
            lay_out(self.groups, side, rank, self.num_blocks, self.kernels) for rank in range(side.num_ranks)
        ]

    def layers(self, g: KVCacheGroup, rank: int) -> list[int]:
        """Those that a rank has, by position."""
        return [layer for layer in g.layers if self.side.owns(rank, layer)]

    def _spots(self, g: KVCacheGroup, rank: int, kernel: int, tokens: Ints) -> tuple[Ints, Ints]:
        """(kernel block, row in it) of the rows of a rank's tokens."""
        held = np.zeros(1, dtype=np.int64)
        if g.spec.part == "attention":
            rows = np.arange(g.spec.block_size)
            held = rows[self.side.owned(rank, "attention", rows)]
        row_of = {row: local for local, row in enumerate(held.tolist())}
        in_block = tokens % g.spec.block_size if g.spec.part == "attention" else np.zeros_like(tokens)
        local = np.array([row_of[row] for row in in_block.tolist()], dtype=np.int64)
        blocks = np.asarray(self.tables[g.index])[tokens // g.spec.block_size]
        return blocks * (len(held) // kernel) + local // kernel, local % kernel

    def _num_kept_blocks(self, g: KVCacheGroup) -> int:
        """Blocks that hold a row which some layer of the group keeps."""
        num_tokens = self.case.num_tokens
        kept = [0] if self.side.keeps_all and g.spec.part == "attention" else None
        first = kept or live_tokens(self.case.model, g.layers[0], g.spec.part, num_tokens)[:1]
        begin = int(first[0]) if len(first) else num_tokens
        return -(-num_tokens // g.spec.block_size) - begin // g.spec.block_size

    def fill(self, rank: int, content: Content, end: int | None = None) -> Ints:
        """A rank's pages, holding the live rows (those before position `end`), UNKNOWN elsewhere."""
        pages = np.full(self.ranks[rank].pages_bytes, UNKNOWN, dtype=np.int64)
        for g, places, kernel in zip(self.groups, self.places[rank], self.kernels, strict=True):
            part = g.spec.part
            for position, layer in enumerate(self.layers(g, rank)):
                tokens = live_tokens(self.case.model, layer, part, self.case.num_tokens)
                tokens = tokens if end is None else tokens[tokens < end]
                tokens = tokens[self.side.owned(rank, part, tokens)]
                blocks, rows = self._spots(g, rank, kernel, tokens)
                at = tokens if part == "attention" else np.zeros_like(tokens)
                for name, place in places.items():
                    # [token, unit, byte]
                    where = place.addresses[position, blocks, :, rows]
                    pages[where] = content[layer, part, name][place.units][:, at].transpose(1, 0, 2)
        return pages

    def open_bytes(self, rank: int, other: Engine) -> np.ndarray:
        """Which bytes of a rank's pages a transfer may write: of each layer the rows that lie in one block
        with a live one, on both sides."""
        may = np.zeros(self.ranks[rank].pages_bytes, dtype=bool)
        sizes = {key: g.spec.block_size for g in other.groups for key in g.keys}
        for g, places, kernel in zip(self.groups, self.places[rank], self.kernels, strict=True):
            size, part = g.spec.block_size, g.spec.part
            for position, layer in enumerate(self.layers(g, rank)):
                live = live_tokens(self.case.model, layer, part, self.case.num_tokens)
                other_size = sizes[layer, part]
                tokens = live
                if part == "attention":
                    around = np.arange(self.case.num_tokens + size)
                    segments = [(t // size << 20) + t // other_size for t in (around, live)]
                    tokens = around[np.isin(*segments)]
                tokens = tokens[self.side.owned(rank, part, tokens)]
                blocks, rows = self._spots(g, rank, kernel, tokens)
                for place in places.values():
                    may[place.addresses[position, blocks, :, rows]] = True
        return may


def moved_bytes(reads: BlockReads, num_source_blocks: int, num_blocks: int) -> tuple[Ints, Ints]:
    """Source and destination address of every byte, by the descriptors that are asked for."""
    pattern = reads.pattern
    source, destination = reads.indices(num_source_blocks, num_blocks)
    lengths = pattern.runs.lengths[source // num_source_blocks]
    assert np.array_equal(source // num_source_blocks, destination // num_blocks)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    starts = (
        addresses[index // count] + index % count * strides[index // count]
        for index, count, addresses, strides in (
            (source, num_source_blocks, pattern.runs.source, pattern.source_strides),
            (destination, num_blocks, pattern.runs.destination, pattern.destination_strides),
        )
    )
    here, there = (np.repeat(s, lengths) + within for s in starts)
    return here, there


def is_prime_to(one: int, other: int) -> bool:
    """Neither divides the other."""
    return gcd(one, other) not in (one, other)
