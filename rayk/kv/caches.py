"""CanonicalKVCaches: one int8 buffer per rank, and everything that is a view of it.

Legend: B kernel blocks, H head slots, N token slots of a kernel block, C content elements (K then V).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rayk.kv.geometry import GENERATION_BYTES, GroupGeometry, RankGeometry

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


CacheView = torch.Tensor | Mapping[str, torch.Tensor]
"""What a layer binds: attention one tensor [B, H, N, C]; a state its bundles, [B, U, 1, C] each."""


@dataclass(frozen=True)
class FieldView:
    """One field of a layer's cache as its kernels see it, to prove what they wrote.

    `view` is [B, U, N, C of this field], typed, a view of the tensors the kernels use. `units`: global ids of
    its U units, as the layer's weights were cut.
    """

    name: str
    view: torch.Tensor
    units: tuple[int, ...]


class OwnsCache(Protocol):
    """What keeps one part of a layer's cache: attention, or a recurrent mixer."""

    def bind_kv_cache(self, view: Any) -> None:
        """Use the view (see CacheView) from now on; strides are arbitrary but C is dense."""
        ...

    def unbind_kv_cache(self) -> None:
        """Forget the cache, so that its buffer can be freed."""
        ...

    def field_views(self) -> tuple[FieldView, ...]:
        """Every field of the bound cache, derived from the tensors that the kernels use."""
        ...


class BindsKVCache(Protocol):
    """A layer that owns state in the cache."""

    def bind_kv_cache(self, view: torch.Tensor) -> None:
        """Take the layer's view [B, H, N, C]; strides are arbitrary but C is dense."""
        ...


@dataclass(frozen=True, slots=True)
class BlockReference:
    """Where one block of a group lies in one tensor: bytes [offset, offset + num_bytes) of a row."""

    tensor: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class CanonicalKVCaches:
    """What a connector, the offload tier and the planner receive.

    `tensors`: int8 [num_blocks, bytes] (rows may be strided), together covering all pages exactly once.
    `references[g]`: which bytes of row b of which tensors hold block b of group g; one for layouts with
    blocks outermost.
    """

    buffer: torch.Tensor
    geometry: RankGeometry
    tensors: tuple[torch.Tensor, ...]
    references: tuple[tuple[BlockReference, ...], ...]

    @property
    def generations(self) -> torch.Tensor:
        """int64 [num_blocks]: counts how often each block was handed out; inside the buffer."""
        start = self.geometry.generations_offset
        table = self.buffer[start : start + self.geometry.num_blocks * GENERATION_BYTES]
        return table.view(torch.int64)

    def view(self, layer: int) -> torch.Tensor:
        """The typed view [B, H, N, C] a layer's kernels write and read."""
        for group in self.geometry.groups:
            if layer in group.group.layers:
                return _layer_view(self.buffer, self.geometry, group, group.group.layers.index(layer))
        raise KeyError(f"layer {layer} keeps no KV")

    def bind(self, layers: Mapping[int, BindsKVCache]) -> None:
        """Give every layer its view. AssertionError unless exactly the cached layers are there."""
        cached = {layer for g in self.geometry.groups for layer in g.group.layers}
        assert cached == set(layers), f"layers {sorted(set(layers) ^ cached)} do not match the cache"
        for index, layer in layers.items():
            layer.bind_kv_cache(self.view(index))


def allocate(geometry: RankGeometry, device: torch.device, fill: int | None = 0) -> CanonicalKVCaches:
    """Allocate one rank's buffer, int8 [geometry.buffer_bytes], and its views.

    `fill` is the byte written everywhere (tests poison with it); None leaves the memory as it comes.
    Generations start at zero.
    """
    buffer = torch.empty(geometry.buffer_bytes, dtype=torch.int8, device=device)
    if fill is not None:
        buffer.fill_(fill)
    buffer[geometry.pages_bytes :] = 0
    pages = buffer[: geometry.pages_bytes]
    if geometry.layout.block_outermost:
        # One tensor holds whole blocks, of every group.
        tensors: tuple[torch.Tensor, ...] = (pages.view(geometry.num_blocks, geometry.block_bytes),)
        used = [1 for _ in geometry.groups]
    else:
        # One tensor per index of the axes outside B; a group's padding positions come last.
        outside = geometry.layout.name.split("B")[0]
        per_position = len(geometry.groups[0].fields[0].units) if "H" in outside else 1
        count = geometry.groups[0].group.num_positions * per_position
        tensors = pages.view(count, geometry.num_blocks, geometry.block_bytes // count).unbind()
        used = [len(g.group.layers) * per_position for g in geometry.groups]
    references = tuple(tuple(BlockReference(i, 0, tensors[i].shape[1]) for i in range(n)) for n in used)
    return CanonicalKVCaches(buffer, geometry, tensors, references)


def _layer_view(
    buffer: torch.Tensor, geometry: RankGeometry, group: GroupGeometry, position: int
) -> torch.Tensor:
    field = group.fields[0]
    dtype = TORCH_DTYPES[field.field.dtype]
    content = sum(f.field.row_bytes for f in group.fields)
    strides = (field.block_stride, field.unit_stride, field.row_stride)
    offset = field.offset + position * field.layer_stride
    itemsize = dtype.itemsize
    assert all(n % itemsize == 0 for n in (*strides, offset, content)), "unaligned for its dtype"
    shape = (
        geometry.num_blocks * group.kernel_blocks_per_block,
        len(field.units),
        group.kernel_block_size,
        content // itemsize,
    )
    # The generation table's tail may not fill an element: view only the pages.
    pages = buffer[: geometry.pages_bytes].view(dtype)
    return torch.as_strided(pages, shape, (*(s // itemsize for s in strides), 1), offset // itemsize)
