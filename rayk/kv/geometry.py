"""Where every byte of one rank's KV cache lies. Free of torch.

The address of a field's row is affine:
    offset + position * layer_stride + block * block_stride + slot * unit_stride + row * row_stride
with `block` a *kernel* block (a manager's block is `kernel_blocks_per_block` consecutive ones), `slot` the
place of a global unit in the rank's shard, and `row` the token slot inside the kernel block. All groups
of a rank share one buffer and one pool of block ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from rayk.kv.fields import ITEMSIZE, PageField
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import KVCacheLayout

GENERATION_BYTES = 8
"""Each block has an int64 generation behind the pages, in the same buffer and registration."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The canonical name of a byte of a block, and the block that holds it."""

    group: int
    layer: int
    field: str
    unit: int
    row: int
    """Token slot inside the (manager's) block."""
    byte: int
    block: int


@dataclass(frozen=True, slots=True)
class FieldGeometry:
    """Where one field of one group lies in a rank's buffer; strides in bytes."""

    field: PageField
    units: tuple[int, ...]
    """Global unit id in each slot."""
    offset: int
    layer_stride: int
    block_stride: int
    unit_stride: int
    row_stride: int

    def address(self, position: int, block: int, slot: int, row: int) -> int:
        """First byte of a row; `block` and `row` count kernel blocks and rows inside one."""
        return (
            self.offset
            + position * self.layer_stride
            + block * self.block_stride
            + slot * self.unit_stride
            + row * self.row_stride
        )


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV group on one rank."""

    group: KVCacheGroup
    kernel_block_size: int
    fields: tuple[FieldGeometry, ...]
    page_bytes: int
    """Bytes of one layer for one (manager's) block on this rank, without padding."""

    @property
    def block_size(self) -> int:
        """Tokens per manager's block."""
        return self.group.spec.block_size

    @property
    def kernel_blocks_per_block(self) -> int:
        """Kernel blocks in one manager's block."""
        return self.block_size // self.kernel_block_size


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """Everything one rank allocates: what transfer plans and `rayk explain` are computed from."""

    tp_size: int
    tp_rank: int
    layout: KVCacheLayout
    num_blocks: int
    block_bytes: int
    """Bytes of one manager's block over all positions (padding included)."""
    groups: tuple[GroupGeometry, ...]

    @property
    def pages_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_blocks * self.block_bytes

    @property
    def generations_offset(self) -> int:
        """Where the generation table starts: after the pages, aligned to 64 bytes."""
        return -(-self.pages_bytes // 64) * 64

    @property
    def buffer_bytes(self) -> int:
        """Size of the one buffer: pages, then generations."""
        return self.generations_offset + self.num_blocks * GENERATION_BYTES

    def describe(self, byte: int) -> list[Coordinate]:
        """What a byte of the buffer is: one coordinate per group (groups share block ids), or none
        (padding, generations)."""
        return [c for g in self.groups for f in g.fields for c in _decode(g, f, byte, self.num_blocks)]


def plan_rank(
    groups: Sequence[KVCacheGroup],
    layout: KVCacheLayout,
    *,
    tp_size: int,
    tp_rank: int,
    num_blocks: int,
    kernel_block_size: int | None = None,
) -> RankGeometry:
    """Lay out all groups of one rank in one buffer.

    `kernel_block_size` must divide every group's block size (None: equal to it). Pages of unlike size are
    padded to the largest; the layout must accept them (`layout_veto`). Raises Unsupported (from the
    shard) when the TP size does not fit the model.
    """
    assert num_blocks >= 2, "a null block and at least one other"
    positions = groups[0].num_positions
    assert all(g.num_positions == positions for g in groups), "groups fill the same block bytes"
    page = max(_page_bytes(g, tp_size, tp_rank) for g in groups)
    # Every group cuts its kernel blocks from the page, and each must start at a whole element.
    alignment = lcm(*(_kernel_blocks(g, kernel_block_size) * ITEMSIZE[g.spec.dtype] for g in groups))
    page = -(-page // alignment) * alignment
    laid_out = tuple(
        _plan_group(g, layout, tp_size, tp_rank, num_blocks, kernel_block_size, page) for g in groups
    )
    return RankGeometry(tp_size, tp_rank, layout, num_blocks, page * positions, laid_out)


def layout_veto(groups: Sequence[KVCacheGroup], layout: KVCacheLayout) -> str | None:
    """Why these groups cannot share one pool in this layout, or None.

    Only LHBNC puts blocks inside heads: a block id then means the same bytes in every group only when all
    groups have the same heads and head bytes.
    """
    shapes = {
        (fields[0].units, sum(f.unit_bytes for f in fields)) for fields in (g.spec.fields() for g in groups)
    }
    if layout.name == "LHBNC" and len(shapes) > 1:
        return f"groups of unlike (heads, bytes per head) cannot share a pool: {sorted(shapes)}"
    return None


def _kernel_blocks(group: KVCacheGroup, kernel_block_size: int | None) -> int:
    """Kernel blocks per manager's block."""
    block_size = group.spec.block_size
    rows = kernel_block_size or block_size
    assert block_size % rows == 0, f"kernel block size {rows} does not divide {block_size}"
    return block_size // rows


def _page_bytes(group: KVCacheGroup, tp_size: int, tp_rank: int) -> int:
    return sum(len(f.shard(tp_size, tp_rank)) * f.unit_bytes for f in group.spec.fields())


def _plan_group(
    group: KVCacheGroup,
    layout: KVCacheLayout,
    tp_size: int,
    tp_rank: int,
    num_blocks: int,
    kernel_block_size: int | None,
    padded_page_bytes: int,
) -> GroupGeometry:
    fields = group.spec.fields()
    units = fields[0].shard(tp_size, tp_rank)
    assert all(f.shard(tp_size, tp_rank) == units for f in fields), "fields of one content axis share units"
    ratio = _kernel_blocks(group, kernel_block_size)
    rows = group.spec.block_size // ratio
    content = sum(f.row_bytes for f in fields)
    sizes = {
        "L": group.num_positions,
        "B": num_blocks * ratio,
        "H": len(units),
        "N": rows,
        "C": content,
    }
    strides = layout.strides(sizes)
    page = len(units) * group.spec.block_size * content
    if page != padded_page_bytes:
        if layout.block_outermost:
            strides["B"] = padded_page_bytes * group.num_positions // ratio
        else:
            assert layout.name.startswith("LB"), "vetoed by layout_veto"
            strides["B"] = padded_page_bytes // ratio
            strides["L"] = padded_page_bytes * num_blocks
    offset = 0
    laid_out = []
    for f in fields:
        laid_out.append(
            FieldGeometry(f, units, offset, strides["L"], strides["B"], strides["H"], strides["N"])
        )
        offset += f.row_bytes
    return GroupGeometry(group, rows, tuple(laid_out), page)


def canonical_page(group: KVCacheGroup) -> GroupGeometry:
    """The canonical page of a group's layers: [unit, layer, row, byte], all units, no padding.

    It is the geometry of an imaginary rank that holds everything, in BHLNC order, over the group's real
    layers only.
    """
    real = KVCacheGroup(group.index, group.spec, group.layers, len(group.layers))
    return _plan_group(real, KVCacheLayout("BHLNC"), 1, 0, 1, None, _page_bytes(real, 1, 0))


def _decode(group: GroupGeometry, field: FieldGeometry, byte: int, num_blocks: int) -> Iterator[Coordinate]:
    rest = byte - field.offset
    if rest < 0:
        return
    axes = {
        "layer": (field.layer_stride, len(group.group.layers)),
        "block": (field.block_stride, num_blocks * group.kernel_blocks_per_block),
        "slot": (field.unit_stride, len(field.units)),
        "row": (field.row_stride, group.kernel_block_size),
    }
    found: dict[str, int] = {}
    for name, (stride, size) in sorted(axes.items(), key=lambda a: (-a[1][0], a[1][1])):
        # An axis of size one may have any stride: it takes nothing.
        found[name] = min(rest // stride, size - 1)
        rest -= found[name] * stride
    if rest >= field.field.row_bytes:
        return
    ratio = group.kernel_blocks_per_block
    yield Coordinate(
        group=group.group.index,
        layer=group.group.layers[found["layer"]],
        field=field.field.name,
        unit=field.units[found["slot"]],
        row=found["block"] % ratio * group.kernel_block_size + found["row"],
        byte=rest,
        block=found["block"] // ratio,
    )
