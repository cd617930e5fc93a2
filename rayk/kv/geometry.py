"""Where every byte of one rank's KV cache lies. Free of torch.

The address of a field's row is affine:

    offset + position * layer_stride + block * block_stride + slot * unit_stride + row * row_stride

`block` is a *kernel* block (a manager's block is `kernel_blocks_per_block` consecutive ones), `slot` the
place of a global unit in the rank's shard, and `row` the row inside the kernel block: a token slot, or 0 for
a state. All groups of a rank share one buffer and one pool of block ids. Groups that ride on another
(kv.riders) lie behind all others, each laid out in a region of its own: kernel blocks cut a block into equal
parts, so that nothing fits between blocks.

Fields of one bundle interleave in the content of each (unit, row). Bundles of a group follow each other just
outside the first of the axes H, N of the layout: BLHNC becomes B L [bundle] H N C, BHLNC B [bundle] H L N C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from math import lcm

import numpy as np
import numpy.typing as npt

from rayk.kv.fields import ITEMSIZE, PageField
from rayk.kv.groups import CacheKey, KVCacheGroup
from rayk.kv.layout import KVCacheLayout
from rayk.kv.specs import KVCacheSpec, rows_per_block
from rayk.parallel.shard import WHOLE, EngineShape, RankShare, TokenShard
from rayk.types.errors import Unsupported

Ints = npt.NDArray[np.int64]

GENERATION_BYTES = 8
"""Size of a block's int64 generation; the table follows the pages, in the same registration."""
ALONE = EngineShape()
"""An engine of one rank."""
BUNDLE_ALIGNMENT = 16
"""Each bundle and page of a group with several bundles starts at a multiple of this, a GPU's widest load."""
REGION_ALIGNMENT = 64
"""Each region starts at a multiple of this, a cache line, which any element size divides."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The canonical name of a byte, and the block that holds it."""

    group: int
    layer: int
    field: str
    unit: int
    row: int
    """Row inside the manager's block as a rank that holds all would count: a token slot, or 0 for a state."""
    byte: int
    block: int


@dataclass(frozen=True, slots=True)
class FieldGeometry:
    """Where one field of one group lies in a rank's buffer; strides in bytes."""

    field: PageField
    units: tuple[int, ...]
    """Global unit id of each slot."""
    offset: int
    layer_stride: int
    block_stride: int
    unit_stride: int
    row_stride: int

    def address(self, position: int, block: int, slot: int, row: int) -> int:
        """First byte of a row; `block` and `row` are a kernel block and a row inside it."""
        return (
            self.offset
            + position * self.layer_stride
            + block * self.block_stride
            + slot * self.unit_stride
            + row * self.row_stride
        )


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """What a rank keeps of a group: some units of some rows of some layers, and where."""

    group: KVCacheGroup
    """It is the engine's: its layers, and the tokens of its blocks, are those of all ranks."""
    kernel_block_size: int
    """Rows of a kernel block."""
    fields: tuple[FieldGeometry, ...]
    page_bytes: int
    """Bytes of one layer for one manager's block on this rank, without padding."""
    layers: tuple[int, ...]
    """Those of the group on this rank, in the group's order; `layers[i]` is at position i. May be empty."""
    num_positions: int
    """Positions of a block on this rank; those from len(layers) on are padding."""
    tokens: TokenShard
    """Whose rows the rank holds; WHOLE for states."""

    @property
    def keys(self) -> tuple[CacheKey, ...]:
        """The caches of this rank."""
        return tuple((layer, self.group.spec.part) for layer in self.layers)

    @property
    def block_size(self) -> int:
        """Tokens that a block id covers."""
        return self.group.spec.block_size

    @property
    def block_rows(self) -> int:
        """Rows of a block on all ranks that share its tokens together."""
        return rows_per_block(self.group.spec)

    @property
    def rows(self) -> int:
        """Rows of a block on this rank."""
        return len(self.held_rows)

    @property
    def held_rows(self) -> Ints:
        """Which of a block's rows the rank holds, ascending, int64 [rows]."""
        return _held_rows(self.group.spec, self.tokens)

    @property
    def local_rows(self) -> Ints:
        """Where each of a block's rows lies in the rank's block, -1 where not held, int64 [block_rows]."""
        return _local_rows(self.group.spec, self.tokens)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that one row stands for: 1, or a whole block for a state."""
        return self.block_size // self.block_rows

    @property
    def kernel_blocks_per_block(self) -> int:
        return self.rows // self.kernel_block_size

    @property
    def bundles(self) -> tuple[tuple[FieldGeometry, ...], ...]:
        names = dict.fromkeys(f.field.bundle for f in self.fields)
        return tuple(tuple(f for f in self.fields if f.field.bundle == name) for name in names)

    def field(self, name: str) -> FieldGeometry:
        """Return the field of this name; KeyError if the group has none."""
        for f in self.fields:
            if f.field.name == name:
                return f
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Region:
    """Pages of some groups, of which a block id means the same bytes in each: those of a model, or of one
    rider."""

    groups: range
    """Indices of the groups."""
    offset: int
    """First byte in the rank's buffer."""
    block_bytes: int
    """Bytes of one manager's block over all positions, padding included."""


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """Everything one rank allocates: what transfer plans and `rayk explain` are computed from."""

    shape: EngineShape
    """The engine's."""
    rank: int
    """In the engine."""
    layout: KVCacheLayout
    num_blocks: int
    """Those of the pool, and those of a scratch behind it."""
    regions: tuple[Region, ...]
    """In the order of groups and of memory: the model's groups together, then each rider by itself."""
    groups: tuple[GroupGeometry, ...]
    num_scratch_blocks: int = 0
    """The last so many blocks are in no block table: see kv.scratch."""

    @property
    def num_pool_blocks(self) -> int:
        """Count the blocks that tables may name, the null block among them."""
        return self.num_blocks - self.num_scratch_blocks

    @property
    def share(self) -> RankShare:
        return self.shape.share(self.rank)

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.shape.num_ranks

    @property
    def tp_size(self) -> int:
        return self.shape.tp

    @property
    def tp_rank(self) -> int:
        """Which units the rank holds, of its stage; another rank of the engine may have the same."""
        return self.share.tp_rank

    @property
    def block_bytes(self) -> int:
        """Bytes of one manager's block over all positions, padding and riders included."""
        return sum(region.block_bytes for region in self.regions)

    @property
    def pages_bytes(self) -> int:
        """End of the last region."""
        last = self.regions[-1]
        return last.offset + self.num_blocks * last.block_bytes

    def region_of(self, group: int) -> Region:
        """Return the region in which a group lies."""
        return next(region for region in self.regions if group in region.groups)

    @property
    def generations_offset(self) -> int:
        return -(-self.pages_bytes // 64) * 64

    @property
    def buffer_bytes(self) -> int:
        return self.generations_offset + self.num_blocks * GENERATION_BYTES

    def describe(self, byte: int) -> list[Coordinate]:
        """Return the coordinates of a byte, one per group (they share block ids); none for padding and
        generations."""
        return [c for g in self.groups for f in g.fields for c in _decode(g, f, byte, self.num_blocks)]


def plan_rank(
    groups: Sequence[KVCacheGroup],
    layout: KVCacheLayout,
    *,
    num_blocks: int,
    shape: EngineShape = ALONE,
    rank: int = 0,
    kernel_block_sizes: Sequence[int] | None = None,
    num_scratch_blocks: int = 0,
) -> RankGeometry:
    """Lay out all groups of one rank, of an engine of this shape, in one buffer.

    `num_scratch_blocks`: the last so many of `num_blocks` are the scratch's.

    `kernel_block_sizes`: rows of a kernel block per group, each a divisor of the rows of a rank's block
    (None: equal to them). Where blocks are outermost, groups with different pages each use a block in their
    own way; elsewhere they are padded to the largest page, and the layout must accept them (`layout_veto`).
    Raises Unsupported if the TP size does not fit the model, or a block does not hold whole turns of the
    ranks that share its tokens, or for a drafter's layers beside stages of the model's.
    """
    assert num_blocks >= 2, "a null block and at least one other"
    num_own = sum(g.rides is None for g in groups)
    assert all(g.rides is None for g in groups[:num_own]), "riders come last"
    if num_own < len(groups) and shape.pp > 1:
        raise Unsupported(
            f"a drafter's layers and pipeline stages: {shape.pp} stages "
            "(mend: pp: 1, or speculative.method ngram)"
        )
    sizes: Sequence[int | None] = kernel_block_sizes or [None] * len(groups)
    parts = [range(num_own), *(range(i, i + 1) for i in range(num_own, len(groups)))]
    regions: list[Region] = []
    placed: list[GroupGeometry] = []
    offset = 0
    for part in parts:
        laid_out, positions = _lay_out_together(
            [groups[i] for i in part], layout, shape, rank, num_blocks, [sizes[i] for i in part]
        )
        # Bytes per index of the block axis, equal for all groups: whole blocks, or pages inside a layer.
        step = max(one.step for one in laid_out)
        # Every group divides it into kernel blocks, which must start at whole elements. A stage may keep
        # nothing.
        alignment = lcm(*(one.ratio * one.alignment for one in laid_out))
        step = _round_up(max(step, 1), alignment)
        placed += (one.place(step, offset) for one in laid_out)
        regions.append(Region(part, offset, step if layout.block_outermost else step * positions))
        offset = _round_up(offset + num_blocks * regions[-1].block_bytes, REGION_ALIGNMENT)
    return RankGeometry(shape, rank, layout, num_blocks, tuple(regions), tuple(placed), num_scratch_blocks)


def _lay_out_together(
    groups: Sequence[KVCacheGroup],
    layout: KVCacheLayout,
    shape: EngineShape,
    rank: int,
    num_blocks: int,
    kernel_block_sizes: Sequence[int | None],
) -> tuple[list[_Share], int]:
    """Lay out the groups of one region, each by itself; also returns the positions of its blocks."""
    positions = groups[0].num_positions
    assert all(g.num_positions == positions for g in groups), "groups have the same positions"
    share = shape.share(rank)
    held = [tuple(n for n in g.layers if share.layers is None or n in share.layers) for g in groups]
    if share.layers is not None:
        positions = max(1, *map(len, held))
    laid_out = [
        _lay_out(g, layout, shape, share, layers, positions, num_blocks=num_blocks, kernel_block_size=size)
        for g, layers, size in zip(groups, held, kernel_block_sizes, strict=True)
    ]
    return laid_out, positions


def layout_veto(
    groups: Sequence[KVCacheGroup],
    layout: KVCacheLayout,
    kernel_block_sizes: Sequence[int] | None = None,
    dcp: int = 1,
) -> str | None:
    """Say why these groups cannot share one pool in this layout, or None, where `dcp` ranks share tokens.

    Where blocks lie inside heads or token slots, a block id means the same bytes in every group only if all
    groups have the same heads and head bytes, and the same rows per kernel block wherever that is cut into
    rows or padded. The check is stricter than necessary: different heads or rows of equal total bytes would
    work too.
    """
    if not {"H", "N"} & set(layout.around_blocks):
        return None
    # What rides has a region of its own.
    if kernel_block_sizes:
        kernel_block_sizes = [n for g, n in zip(groups, kernel_block_sizes, strict=True) if g.rides is None]
    groups = [g for g in groups if g.rides is None]
    unlike = [_difference(groups[0], other, dcp) for other in groups[1:]]
    is_padded = len(_bundles(groups[0].spec.fields())) > 1
    if "N" in layout.around_blocks or is_padded:
        rows = kernel_block_sizes or [_shared_rows(g.spec, dcp) for g in groups]
        sizes = [sum(f.row_bytes for f in g.spec.fields()) for g in groups]
        for g, *shape in zip(groups[1:], rows[1:], sizes[1:], strict=True):
            if shape[0] != rows[0] or (is_padded and shape[1] != sizes[0]):
                sides = zip((groups[0], g), ((rows[0], sizes[0]), shape), strict=True)
                texts = (
                    f"{h.spec.kind} has kernel blocks of {n} rows of {size:,} bytes" for h, (n, size) in sides
                )
                unlike.append(", ".join(texts))
    found = next((text for text in unlike if text), None)
    return f"{layout.name} holds groups of one shape only: {found}" if found else None


def canonical_page(group: KVCacheGroup) -> GroupGeometry:
    """Return the canonical page of a group's layers: per bundle [unit, layer, row, byte], all units, no
    padding.

    It is the geometry of an imaginary rank that holds everything, in BHLNC order, without padding positions.
    """
    real = replace(group, num_positions=len(group.layers), seen=(), carries=None)
    order, alone = KVCacheLayout("BHLNC"), ALONE.share(0)
    layers = real.layers
    share = _lay_out(real, order, ALONE, alone, layers, len(layers), num_blocks=1, is_packed=True)
    return share.place(share.step, 0)


@lru_cache(maxsize=1024)
def _held_rows(spec: KVCacheSpec, tokens: TokenShard) -> Ints:
    return tokens.rows(spec.block_size) if spec.has_token_rows else np.zeros(1, dtype=np.int64)


@lru_cache(maxsize=1024)
def _local_rows(spec: KVCacheSpec, tokens: TokenShard) -> Ints:
    held = _held_rows(spec, tokens)
    found = np.full(rows_per_block(spec), -1, dtype=np.int64)
    found[held] = np.arange(len(held))
    found.setflags(write=False)
    return found


def _shared_rows(spec: KVCacheSpec, dcp: int) -> int:
    """Count the rows of a block on one of `dcp` ranks that share tokens."""
    return rows_per_block(spec) // (dcp if spec.has_token_rows else 1)


def _bundles(fields: Sequence[PageField]) -> list[list[PageField]]:
    bundles: dict[str, list[PageField]] = {}
    for f in fields:
        bundles.setdefault(f.bundle, []).append(f)
    return list(bundles.values())


def _bundle_shape(fields: Sequence[PageField], rows: int) -> tuple[int, int, int]:
    """Return (units, readers, bytes of a unit in so many rows), which decide how a bundle lies on a rank."""
    return fields[0].units, fields[0].readers, sum(rows * f.row_bytes for f in fields)


def _difference(one: KVCacheGroup, other: KVCacheGroup, dcp: int) -> str:
    """Return the first bundle in which two groups differ, in words; "" if there is none."""
    names = [g.spec.kind for g in (one, other)]
    if names[0] == names[1]:
        names = [f"{g.spec.kind} (layer {g.layers[0]})" for g in (one, other)]
    bundles = (_bundles(g.spec.fields()) for g in (one, other))
    rows = [_shared_rows(g.spec, dcp) for g in (one, other)]
    nothing: list[PageField] = []
    for pair in zip_longest(*bundles, fillvalue=nothing):
        shapes = [_bundle_shape(fields, n) if fields else None for fields, n in zip(pair, rows, strict=True)]
        if shapes[0] != shapes[1]:
            texts = [_shape_text(fields, n) for fields, n in zip(pair, rows, strict=True)]
            if texts[0] == texts[1]:  # which rank holds what then differs
                texts += [f" for {fields[0].readers} {fields[0].reader_name}" for fields in pair]
            return ", ".join(f"{n} has {''.join(texts[i::2])}" for i, n in enumerate(names))
    return ""


def _shape_text(fields: Sequence[PageField], rows: int) -> str:
    """Describe a bundle's shape in words, e.g. `8 heads of 160 bytes (conv_x)`."""
    if not fields:
        return "nothing more"
    units, _, size = _bundle_shape(fields, rows)
    name = fields[0].unit_name + "s"[: units != 1]
    return f"{units} {name} of {size:,} bytes ({', '.join(f.name for f in fields)})"


@dataclass(frozen=True, slots=True)
class _Bundle:
    """One bundle of a group on one rank: its start, and the strides of the axes inside it."""

    fields: list[PageField]
    units: tuple[int, ...]
    offset: int
    strides: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Share:
    """One group laid out by itself on one rank; `place` fits it into the shared pool."""

    group: KVCacheGroup
    layers: tuple[int, ...]
    num_positions: int
    tokens: TokenShard
    layout: KVCacheLayout
    num_blocks: int
    kernel_block_size: int
    ratio: int
    alignment: int
    """Every kernel block starts at a multiple of this."""
    bundles: tuple[_Bundle, ...]
    outer: dict[str, int]
    """Strides of the axes outside the bundles."""
    step: int
    """Bytes of one manager's block at one index of the axes outside B."""

    def place(self, step: int, start: int) -> GroupGeometry:
        """Return the group in a region that starts there, with this step; padding goes to the end of each
        kernel block."""
        outer = dict(self.outer)
        if "B" in outer:
            outer["B"] = step // self.ratio
            if not self.layout.block_outermost:
                outer["L"] = step * self.num_blocks
        else:
            assert step == self.step, "vetoed by layout_veto"
        laid_out = []
        for bundle in self.bundles:
            offset, strides = start + bundle.offset, outer | bundle.strides
            for f in bundle.fields:
                axes = (strides[axis] for axis in "LBHN")
                laid_out.append(FieldGeometry(f, bundle.units, offset, *axes))
                offset += f.row_bytes
        rows = self.ratio * self.kernel_block_size
        page = sum(len(f.units) * rows * f.field.row_bytes for f in laid_out)
        return GroupGeometry(
            self.group,
            self.kernel_block_size,
            tuple(laid_out),
            page,
            self.layers,
            self.num_positions,
            self.tokens,
        )


def _lay_out(
    group: KVCacheGroup,
    layout: KVCacheLayout,
    shape: EngineShape,
    share: RankShare,
    layers: tuple[int, ...],
    positions: int,
    *,
    num_blocks: int,
    kernel_block_size: int | None = None,
    is_packed: bool = False,
) -> _Share:
    """Lay out those layers of one group that a rank keeps; `is_packed` switches alignment off. A drafter's
    layers have all tokens on each rank."""
    tokens = share.tokens if group.spec.has_token_rows and group.rides is None else WHOLE
    tp, tp_rank = shape.unit_share(share.tp_rank, is_draft=group.rides is not None)
    rows = len(_held_rows(group.spec, tokens))
    kernel_block_size = kernel_block_size or rows
    assert rows % kernel_block_size == 0, f"kernel block size {kernel_block_size} does not divide {rows}"
    ratio = rows // kernel_block_size
    fields = _bundles(group.spec.fields())
    alignment = BUNDLE_ALIGNMENT if len(fields) > 1 else lcm(*(ITEMSIZE[f.dtype] for f in fields[0]))
    padding = 1 if is_packed or len(fields) == 1 else alignment
    axes = layout.name.removesuffix("C")
    cut = min(axes.index("H"), axes.index("N"))
    # Outside blocks, every group has all positions; inside one, those without a layer come last of all, so
    # that what a short group keeps stays in one piece.
    num_layers = len(layers) if layout.block_outermost else positions
    sizes = {"L": num_layers, "B": num_blocks * ratio, "N": kernel_block_size}
    bundles: list[_Bundle] = []
    size = 0
    for members in fields:
        units = members[0].shard(tp, tp_rank)
        assert all(f.shard(tp, tp_rank) == units for f in members), "fields of one bundle share units"
        content = sum(f.row_bytes for f in members)
        strides, used = _strides(axes[cut:], sizes | {"H": len(units)}, content, padding)
        bundles.append(_Bundle(members, units, size, strides))
        size = _round_up(size + used, padding)
    outer, size = _strides(axes[:cut], sizes, size, padding)
    step = outer["B"] * ratio if "B" in outer else size // num_layers // num_blocks
    held = (group, layers, positions, tokens)
    return _Share(*held, layout, num_blocks, kernel_block_size, ratio, alignment, tuple(bundles), outer, step)


def _strides(axes: str, sizes: Mapping[str, int], step: int, padding: int) -> tuple[dict[str, int], int]:
    """Compute the strides of `axes` around an item of `step` bytes, and the total bytes. Pages and blocks
    start at multiples of `padding`."""
    strides: dict[str, int] = {}
    for axis in reversed(axes):
        if axis in "LB":
            step = _round_up(step, padding)
        strides[axis] = step
        step *= sizes[axis]
    return strides, step


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _decode(group: GroupGeometry, field: FieldGeometry, byte: int, num_blocks: int) -> Iterator[Coordinate]:
    rest = byte - field.offset
    if rest < 0 or not group.layers:
        return
    axes = {
        "layer": (field.layer_stride, len(group.layers)),
        "block": (field.block_stride, num_blocks * group.kernel_blocks_per_block),
        "slot": (field.unit_stride, len(field.units)),
        "row": (field.row_stride, group.kernel_block_size),
    }
    found: dict[str, int] = {}
    for name, (stride, size) in sorted(axes.items(), key=lambda a: (-a[1][0], a[1][1])):
        # An axis of size one may have any stride.
        found[name] = min(rest // stride, size - 1)
        rest -= found[name] * stride
    if rest >= field.field.row_bytes:
        return
    ratio = group.kernel_blocks_per_block
    yield Coordinate(
        group=group.group.index,
        layer=group.layers[found["layer"]],
        field=field.field.name,
        unit=field.units[found["slot"]],
        row=int(group.held_rows[found["block"] % ratio * group.kernel_block_size + found["row"]]),
        byte=rest,
        block=found["block"] // ratio,
    )
