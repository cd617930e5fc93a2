"""What every byte of a rank's buffer means, by laying them down one after the other: no stride arithmetic.

`brute_bundles` says in a family's own words (heads, groups, channels) what a cache holds and who reads it;
`brute_addresses` walks the axes in the layout's order with a cursor; `brute_owners` turns that around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import gcd

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import Coordinate, RankGeometry, plan_rank
from rayk.kv.groups import CacheKey, KVCacheGroup, group_layers
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

Ints = npt.NDArray[np.int64]

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "uint8": 1}


def full(
    block_size: int = 4,
    kv_heads: int = 2,
    head_k: int = 3,
    head_v: int = 2,
    dtype: str = "int8",
    query_heads: int = 12,
) -> FullAttentionSpec:
    """A small full-attention spec; K and V of unlike sizes, so that a swap shows."""
    return FullAttentionSpec(block_size, kv_heads, head_k, head_v, dtype, query_heads)


def sliding(window: int, spec: FullAttentionSpec | None = None) -> SlidingWindowSpec:
    """The same with a window."""
    s = spec or full()
    return SlidingWindowSpec(
        s.block_size, s.num_kv_heads, s.head_size_k, s.head_size_v, s.dtype, s.num_query_heads, window
    )


def chunked(chunk: int, spec: FullAttentionSpec | None = None) -> ChunkedLocalSpec:
    """The same in chunks of `chunk` positions."""
    s = spec or full()
    return ChunkedLocalSpec(
        s.block_size, s.num_kv_heads, s.head_size_k, s.head_size_v, s.dtype, s.num_query_heads, chunk
    )


def mla(block_size: int = 4, latent: int = 5, rope: int = 3, dtype: str = "float16") -> MlaSpec:
    """A small latent cache."""
    return MlaSpec(block_size, latent, rope, dtype, num_query_heads=12)


def mamba1(block_size: int = 50, channels: int = 24, state: int = 2) -> Mamba1Spec:
    """A small selective scan: three runs of 8 channels."""
    return Mamba1Spec(block_size, "float16", conv_width=4, num_channels=channels, state_size=state)


def mamba2(groups: int = 2, heads: int = 12, block_size: int = 50) -> Mamba2Spec:
    """A small Mamba2: no two parts of one size, and taps that do not fill 16 bytes."""
    return Mamba2Spec(
        block_size, "bfloat16", conv_width=3, num_heads=heads, head_size=1, num_groups=groups, state_size=3
    )


def gdn(block_size: int = 50, value_heads: int = 6) -> GatedDeltaNetSpec:
    """A small gated delta net: several value heads read one of two key heads."""
    return GatedDeltaNetSpec(
        block_size,
        "float16",
        conv_width=3,
        num_key_heads=2,
        key_head_size=3,
        num_value_heads=value_heads,
        value_head_size=2,
    )


def keyed(specs: Mapping[int, KVCacheSpec | tuple[KVCacheSpec, ...]]) -> dict[CacheKey, KVCacheSpec]:
    """Layer -> what it keeps, as group_layers takes it."""
    return {
        (layer, spec.part): spec
        for layer, kept in specs.items()
        for spec in (kept if isinstance(kept, tuple) else (kept,))
    }


@dataclass(frozen=True, eq=False)
class Case:
    """A cache to lay out; `kernel` is attention's kernel block size, None for the manager's."""

    name: str
    specs: Mapping[int, KVCacheSpec | tuple[KVCacheSpec, ...]]
    tp_size: int
    kernel: int | None = None
    num_blocks: int = 3
    kernel_by_kind: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        return group_layers(keyed(self.specs))

    def fits(self, layout: str) -> bool:
        """Whether the layout takes it, as layout_veto says it (tests.kv.test_every_order holds that against
        bytes): always, where a block is one stretch of a layer or of all; else where heads and head bytes are
        alike, and kernel blocks where these are cut or padded."""
        if not cuts_blocks(layout):
            return True
        shapes = set()
        for g in self.groups:
            bundles = brute_bundles(g.spec)
            heads = [(b[0].num_units, sum(p.row_bytes for p in b) * brute_rows(g.spec)) for b in bundles]
            is_cut = layout.index("N") < layout.index("B") or len(bundles) > 1
            shapes.add((tuple(heads), self.kernel_rows(g) if is_cut else 0))
        return len(shapes) == 1

    def rank(self, layout: str, tp_rank: int, num_blocks: int | None = None) -> RankGeometry:
        return plan_rank(
            self.groups,
            LAYOUTS[layout],
            shape=EngineShape(self.tp_size),
            rank=tp_rank,
            num_blocks=num_blocks or self.num_blocks,
            kernel_block_sizes=kernel_block_sizes(self.groups, self.kernel, self.kernel_by_kind),
        )

    def kernel_rows(self, group: KVCacheGroup) -> int:
        """Rows of a kernel block."""
        rows = brute_rows(group.spec)
        return 1 if rows == 1 else self.kernel_by_kind.get(group.spec.kind, self.kernel) or rows


def cuts_blocks(layout: str) -> bool:
    """Whether a block is in pieces within a layer: blocks lie inside heads or token slots."""
    return layout.index("B") > min(layout.index("H"), layout.index("N"))


def ident(value: object) -> str:
    """Readable ids for pytest."""
    return str(value)


# --- what a cache holds ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One field: what its units hold, and who reads which."""

    name: str
    row_bytes: int
    itemsize: int
    num_readers: int
    unit_of: Callable[[int], int]
    """Reader -> the unit it reads."""

    @property
    def num_units(self) -> int:
        """Before tensor parallelism."""
        return len({self.unit_of(r) for r in range(self.num_readers)})

    def units(self, tp_size: int, tp_rank: int) -> list[int]:
        """What one rank needs: its equal share of the readers, each asked."""
        found: list[int] = []
        for reader in range(self.num_readers):
            if reader // (self.num_readers // tp_size) == tp_rank and self.unit_of(reader) not in found:
                found.append(self.unit_of(reader))
        return found


def brute_bundles(spec: KVCacheSpec) -> list[list[Piece]]:
    """Stretches of a page, each with the fields that interleave in it."""
    if isinstance(spec, FullAttentionSpec | MlaSpec) and spec.dtype not in ITEMSIZES:
        return _quantised_bundles(spec)
    size = ITEMSIZES[spec.dtype]
    match spec:
        case FullAttentionSpec():
            per_head = spec.num_query_heads // spec.num_kv_heads
            return [
                [
                    Piece(name, n * size, size, spec.num_query_heads, lambda query: query // per_head)
                    for name, n in (("k", spec.head_size_k), ("v", spec.head_size_v))
                ]
            ]
        case MlaSpec():
            return [
                [
                    Piece(name, n * size, size, spec.num_query_heads, lambda query: 0)
                    for name, n in (("latent", spec.latent_size), ("rope", spec.rope_size))
                ]
            ]
        case Mamba1Spec():
            run = gcd(spec.num_channels, 16)
            taps, state = (spec.conv_width - 1) * size, spec.state_size * 4
            return [
                [Piece("conv_x", run * taps, size, spec.num_channels, lambda channel: channel // run)],
                [Piece("ssm", run * state, 4, spec.num_channels, lambda channel: channel // run)],
            ]
        case Mamba2Spec():
            heads, taps = spec.num_heads, (spec.conv_width - 1) * size
            per_group = heads // spec.num_groups
            return [
                [Piece("conv_x", spec.head_size * taps, size, heads, lambda head: head)],
                [Piece("conv_b", spec.state_size * taps, size, heads, lambda head: head // per_group)],
                [Piece("conv_c", spec.state_size * taps, size, heads, lambda head: head // per_group)],
                [Piece("ssm", spec.head_size * spec.state_size * 4, 4, heads, lambda head: head)],
            ]
        case GatedDeltaNetSpec():
            heads, taps = spec.num_value_heads, (spec.conv_width - 1) * size
            per_key, (dk, dv) = heads // spec.num_key_heads, (spec.key_head_size, spec.value_head_size)
            return [
                [Piece("conv_q", dk * taps, size, heads, lambda head: head // per_key)],
                [Piece("conv_k", dk * taps, size, heads, lambda head: head // per_key)],
                [Piece("conv_v", dv * taps, size, heads, lambda head: head)],
                [Piece("delta", dk * dv * 4, 4, heads, lambda head: head)],
            ]
    raise AssertionError(spec)


def _quantised_bundles(spec: FullAttentionSpec | MlaSpec) -> list[list[Piece]]:
    """A byte an element, or half of one; scales of 4 bytes per (head, token), or of one per 16 elements."""

    def piece(name: str, row_bytes: int, itemsize: int = 1) -> Piece:
        return Piece(name, row_bytes, itemsize, spec.num_query_heads, lambda query: query // per_head)

    if isinstance(spec, MlaSpec):
        per_head, a, b = spec.num_query_heads, "latent", "rope"
        k, v = spec.latent_size, spec.rope_size
    else:
        per_head, a, b = spec.num_query_heads // spec.num_kv_heads, "k", "v"
        k, v = spec.head_size_k, spec.head_size_v
    match spec.dtype:
        case "fp8_e4m3":
            return [[piece(a, k), piece(b, v)]]
        case "fp8_e4m3_token_head":
            return [[piece(a, k), piece(b, v), piece(f"{a}_scale", 4, 4), piece(f"{b}_scale", 4, 4)]]
        case "nvfp4":
            return [
                [piece(a, k // 2), piece(f"{a}_scale", k // 16)],
                [piece(b, v // 2), piece(f"{b}_scale", v // 16)],
            ]
    raise AssertionError(spec)


def brute_rows(spec: KVCacheSpec) -> int:
    """Rows of a block."""
    return spec.block_size if spec.part == "attention" else 1


def brute_page_bytes(spec: KVCacheSpec, tp_size: int = 1, tp_rank: int = 0) -> int:
    """Bytes of one layer and block on a rank, without padding."""
    return sum(
        len(piece.units(tp_size, tp_rank)) * piece.row_bytes * brute_rows(spec)
        for bundle in brute_bundles(spec)
        for piece in bundle
    )


# --- where it lies --------------------------------------------------------------------------------


class _Pen:
    """Lays the bytes of one group down in a layout's order."""

    def __init__(self, case: Case, group: KVCacheGroup, layout: str, tp_rank: int, num_blocks: int) -> None:
        self.bundles = brute_bundles(group.spec)
        self.units = [bundle[0].units(case.tp_size, tp_rank) for bundle in self.bundles]
        kernel = case.kernel_rows(group)
        self.ratio = brute_rows(group.spec) // kernel
        layers = len(group.layers) if layout[0] == "B" else group.num_positions
        self.sizes = {"L": layers, "B": num_blocks * self.ratio, "N": kernel}
        first = min(layout.index("H"), layout.index("N"))
        self.order = layout[:first] + "*" + layout[first:-1]
        self.alignment = 16 if len(self.bundles) > 1 else max(p.itemsize for p in self.bundles[0])
        self.step: int | None = None
        """Bytes of a kernel block; None: as they come."""
        self.places: dict[str, Ints] = {}
        for bundle, units in zip(self.bundles, self.units, strict=True):
            shape = (self.sizes["L"], self.sizes["B"], len(units), kernel)
            for piece in bundle:
                self.places[piece.name] = np.full((*shape, piece.row_bytes), -1, dtype=np.int64)
        self._cursor = 0

    def lay(self, step: int | None) -> int:
        """Write everything; the end of the last byte."""
        self.step, self._cursor = step, 0
        self._walk(self.order, {})
        return self._cursor

    def _align(self) -> None:
        if len(self.bundles) > 1:
            while self._cursor % 16:
                self._cursor += 1

    def _walk(self, axes: str, at: dict[str, int]) -> None:
        if not axes:
            for piece in self.bundles[at["*"]]:
                index = tuple(at[a] for a in "LBHN")
                self.places[piece.name][index] = np.arange(self._cursor, self._cursor + piece.row_bytes)
                self._cursor += piece.row_bytes
            return
        for i in self._range(axes[0], at):
            if axes[0] in "*LB":
                self._align()
            if axes[0] == "B" and self.step is not None and "*" in axes:
                # Outside bundles, a block starts where its number says.
                self._cursor = (at.get("L", 0) * self.sizes["B"] + i) * self.step
            self._walk(axes[1:], at | {axes[0]: i})
        if axes[0] == "*":
            self._align()

    def _range(self, axis: str, at: dict[str, int]) -> range:
        if axis == "*":
            return range(len(self.bundles))
        return range(len(self.units[at["*"]]) if axis == "H" else self.sizes[axis])


@cache
def brute_addresses(case: Case, layout: str, tp_rank: int) -> list[dict[str, Ints]]:
    """Per group, field -> byte addresses [L, B, U, N, bytes] on one rank (L: the real layers)."""
    pens = [_Pen(case, g, layout, tp_rank, case.num_blocks) for g in case.groups]
    step = None
    if not cuts_blocks(layout):
        step = _pool_step(case, layout, tp_rank)
    for pen in pens:
        pen.lay(None if step is None else step // pen.ratio)
    return [
        {name: places[: len(g.layers)] for name, places in pen.places.items()}
        for g, pen in zip(case.groups, pens, strict=True)
    ]


def brute_clashes(case: Case, layout: str, tp_rank: int) -> bool:
    """Whether a byte of one block in a group is of another block in another group."""
    addresses, blocks = [], []
    for g, places in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        ratio = brute_rows(g.spec) // case.kernel_rows(g)
        for found in places.values():
            block = np.arange(found.shape[1]) // ratio
            addresses.append(found.ravel())
            blocks.append(np.broadcast_to(block[:, None, None, None], found.shape).ravel())
    pairs = np.unique(np.stack([np.concatenate(addresses), np.concatenate(blocks)]), axis=1)
    return len(np.unique(pairs[0])) < pairs.shape[1]


def _pool_step(case: Case, layout: str, tp_rank: int) -> int:
    """Bytes of a block (of a page, where layers are outermost): the fewest that hold any group's and that
    every group can cut into whole kernel blocks."""
    needs, cuts = [], []
    for g in case.groups:
        pen = _Pen(case, g, layout, tp_rank, 1)
        pen.sizes["B"] = 1
        if layout[0] == "L":
            pen.sizes["L"] = 1
        needs.append(pen.lay(None) * pen.ratio)
        cuts.append(pen.ratio * pen.alignment)
    return next(n for n in range(max(needs), 10**6) if all(n % cut == 0 for cut in cuts))


def brute_coordinates(case: Case, layout: str, tp_rank: int) -> Iterator[tuple[int, Coordinate]]:
    """(byte address, what it is), group by group."""
    for g, places in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        kernel = case.kernel_rows(g)
        ratio = brute_rows(g.spec) // kernel
        units = {p.name: p.units(case.tp_size, tp_rank) for b in brute_bundles(g.spec) for p in b}
        for name, addresses in places.items():
            for (layer, block, slot, row, byte), address in np.ndenumerate(addresses):
                yield (
                    int(address),
                    Coordinate(
                        group=g.index,
                        layer=g.layers[layer],
                        field=name,
                        unit=units[name][slot],
                        row=(block % ratio) * kernel + row,
                        byte=byte,
                        block=block // ratio,
                    ),
                )


@cache
def brute_owners(case: Case, layout: str, tp_rank: int) -> dict[int, list[Coordinate]]:
    """Byte address -> its coordinates, one per group that uses it; padding is absent."""
    owners: dict[int, list[Coordinate]] = {}
    for address, coordinate in brute_coordinates(case, layout, tp_rank):
        owners.setdefault(address, []).append(coordinate)
    return owners


# --- what is laid out ------------------------------------------------------------------------------


_FLOAT = full(head_k=2, head_v=1, dtype="float32")
_HALF = full(kv_heads=4, dtype="float16")
_NARROW = full(head_k=8, head_v=8)
_WIDE = full(head_k=16, head_v=16)
_ODD = full(kv_heads=1)
_HYBRID = {0: full(), 1: full(), 2: sliding(3), 3: sliding(3), 4: sliding(3)}
_TALL = mamba2(heads=6)

_TOKEN_HEAD = full(dtype="fp8_e4m3_token_head", head_k=5, head_v=3)
_NVFP4 = full(dtype="nvfp4", head_k=48, head_v=16)
_TOKEN_LATENT = mla(dtype="fp8_e4m3_token_head")
_NVFP4_LATENT = mla(latent=48, rope=16, dtype="nvfp4")
CASES = [
    Case("one-group", {0: full(), 5: full()}, 1),
    Case("one-group-kernel-2", {0: full(), 5: full()}, 2, 2),
    Case("replicated", {0: full(), 1: full()}, 4),
    Case("uneven", {0: full(), 1: full()}, 3, 2),
    Case("position-padding", _HYBRID, 2, 2),
    Case("float32", {0: _FLOAT, 1: _FLOAT}, 1, 1),
    Case("grown", {0: _NARROW, 1: _NARROW, 2: sliding(5, _WIDE), 3: sliding(5, _WIDE)}, 2, 2),
    Case("unlike-heads", {0: _HALF, 1: sliding(5, full(kv_heads=1, dtype="float16"))}, 2),
    Case("unlike-heads-tp4", {0: full(kv_heads=4), 1: full(), 2: full(kv_heads=4), 3: full()}, 4, 2),
    # Pages of 20 and 16 bytes that must hold whole float32: 24.
    Case("unlike-dtypes", {0: _ODD, 1: full(2, 1, 1, 1, "float32")}, 1, 1),
    Case("one-kind-in-kernel-blocks", _HYBRID, 1, None, kernel_by_kind={"sliding": 2}),
    # Runs of 6 positions begin in the middle of blocks of 4: kernel blocks of 2.
    Case(
        "chunks", {0: chunked(6), 1: chunked(6), 2: chunked(6), 3: full()}, 2, kernel_by_kind={"chunked": 2}
    ),
    Case("latent", {0: mla(), 2: mla()}, 4, 2),
    Case("latents-with-scales", {0: _TOKEN_LATENT, 1: _TOKEN_LATENT}, 2, 2),
    Case("latents-of-four-bits", {0: _NVFP4_LATENT, 3: _NVFP4_LATENT}, 4, 2),
    Case("scales-behind-values", {0: _TOKEN_HEAD, 1: sliding(5, _TOKEN_HEAD)}, 3, 2),
    Case("blocks-of-four-bits", {0: _NVFP4, 1: sliding(5, _NVFP4), 2: _NVFP4}, 2, 2),
    Case("four-bits-beside-heads", {0: (_NVFP4, _TALL), 1: (_NVFP4, _TALL)}, 2, 2),
    Case("channels", {0: mamba1(), 1: mamba1()}, 3),
    Case("one-group-of-b-and-c", {0: mamba2(1), 1: mamba2(1), 2: mamba2(1)}, 4),
    Case("two-groups-of-b-and-c", {0: mamba2(), 1: mamba2()}, 3),
    Case("eight-groups-of-b-and-c", {0: mamba2(8, 24), 3: mamba2(8, 24)}, 6),
    Case("delta", {0: gdn(), 1: gdn()}, 3),
    Case("attention-and-heads", {0: _TALL, 1: full(), 2: _TALL, 3: full(), 4: _TALL}, 2, 2),
    Case("attention-beside-heads", {0: (full(), _TALL), 1: (sliding(5), _TALL), 2: (full(), _TALL)}, 3),
    Case("latent-and-channels", {0: mla(), 1: mamba1(channels=48), 2: mamba1(channels=48)}, 3),
    Case("windows-and-delta", {0: full(), 1: sliding(5), 2: gdn(), 3: gdn()}, 2, 4),
    Case(
        "everything",
        {0: full(), 1: sliding(5), 2: mla(), 3: mamba1(50, 32, 1), 4: mamba2(2, 4), 5: gdn()},
        2,
        2,
        num_blocks=2,
        kernel_by_kind={"mla": 1},
    ),
]

RANK_CASES = [
    (case, layout, rank)
    for case in CASES
    for layout in LAYOUTS
    if case.fits(layout)
    for rank in sorted({0, case.tp_size // 2})
]
"""The first and a middle rank of each; others are like one of them."""
