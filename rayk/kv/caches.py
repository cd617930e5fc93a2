"""CanonicalKVCaches: one int8 buffer per rank, and the views that layers bind.

Legend: B kernel blocks, H head slots, U unit slots, N token slots of a kernel block, C content elements (K
then V).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from rayk.kv.geometry import GENERATION_BYTES, FieldGeometry, GroupGeometry, RankGeometry, Region
from rayk.kv.groups import CacheKey

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


CacheView = torch.Tensor | Mapping[str, torch.Tensor]
"""What a layer binds: attention one tensor [B, H, N, C]; layers with several bundles a mapping by name
(states: [B, U, 1, C]; some formats keep keys and values apart). A bundle of mixed dtypes is viewed as uint8.
"""


@dataclass(frozen=True)
class FieldView:
    """One field of a layer's cache, seen through the tensors that its kernels use, to verify what they wrote.

    `view` is [B, U, N, C of this field], typed. `units` are the global ids of its U units, as the layer's
    weights were cut.
    """

    name: str
    view: torch.Tensor
    units: tuple[int, ...]


class OwnsCache(Protocol):
    """A layer part that keeps a cache: attention or a recurrent mixer."""

    def bind_kv_cache(self, view: Any) -> None:
        """Use this view (a CacheView) from now on; strides are arbitrary but C is dense."""
        ...

    def unbind_kv_cache(self) -> None:
        """Drop the view, so that the buffer can be freed."""
        ...

    def field_views(self) -> tuple[FieldView, ...]:
        """Return every field of the bound cache, derived from the tensors that the kernels use."""
        ...


@dataclass(frozen=True, slots=True)
class BlockReference:
    """Where one block of a group lies in a row of one tensor: bytes [offset, offset + num_bytes)."""

    tensor: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class CanonicalKVCaches:
    """What a connector, the offload tier and the planner receive.

    `tensors`: int8 [num_blocks, bytes] (rows may be strided), together covering all regions exactly once.
    `references[g]`: which bytes of row b of which tensors hold block b of group g; one for layouts with
    blocks outermost.
    """

    buffer: torch.Tensor
    geometry: RankGeometry
    tensors: tuple[torch.Tensor, ...]
    references: tuple[tuple[BlockReference, ...], ...]

    @property
    def is_pinned(self) -> bool:
        """Whether the buffer is page-locked host memory, which a GPU can copy from and to directly."""
        return bool(self.buffer.is_pinned())

    @cached_property
    def generations(self) -> torch.Tensor:
        """int64 [num_blocks], inside the buffer: how often each block was handed out."""
        start = self.geometry.generations_offset
        table = self.buffer[start : start + self.geometry.num_blocks * GENERATION_BYTES]
        return table.view(torch.int64)

    def bump_generations(self, block_ids: Collection[int]) -> None:
        if not block_ids:
            return
        ids, table = np.array(sorted(set(block_ids)), dtype=np.int64), self.generations
        if table.is_cpu:  # torch takes ten times as long for a few numbers
            table.numpy()[ids] += 1
        else:
            table[torch.from_numpy(ids).to(table.device)] += 1

    def view(self, layer: int, part: str = "attention") -> CacheView:
        """Return the typed view that a layer's kernels use: [B, H, N, C], C dense with the fields side by
        side; a mapping if there are several bundles (see CacheView). KeyError if the layer keeps no such
        part."""
        for group in self.geometry.groups:
            if (layer, part) in group.keys:
                position = group.layers.index(layer)
                views = {
                    fields[0].field.bundle: _bundle_view(self.buffer, self.geometry, group, fields, position)
                    for fields in group.bundles
                }
                return views if len(views) > 1 else views.popitem()[1]
        raise KeyError(f"layer {layer} keeps no {part} in the cache")

    def bind(
        self,
        owners: Mapping[CacheKey, OwnsCache],
        readers: Sequence[tuple[CacheKey, OwnsCache]] = (),
    ) -> None:
        """Give every owner its view, and each reader the view of the cache that it reads but never writes.

        AssertionError, with nothing bound, unless the owners are exactly the cached layers and readers read
        only these.
        """
        cached = {key for g in self.geometry.groups for key in g.keys}
        assert cached == set(owners), f"layers {sorted(set(owners) ^ cached)} do not match the cache"
        strange = {key for key, _ in readers} - cached
        assert not strange, f"layers {sorted(strange)} are read and keep nothing"
        for key, layer in (*owners.items(), *readers):
            layer.bind_kv_cache(self.view(*key))

    def unbind(
        self,
        owners: Mapping[CacheKey, OwnsCache],
        readers: Sequence[tuple[CacheKey, OwnsCache]] = (),
    ) -> None:
        """Make all layers drop their views, so that the buffer is freed together with this object."""
        for layer in (*owners.values(), *(reader for _, reader in readers)):
            layer.unbind_kv_cache()


def allocate(
    geometry: RankGeometry, device: torch.device, fill: int | None = 0, *, pinned: bool = False
) -> CanonicalKVCaches:
    """Allocate one rank's buffer, int8 [geometry.buffer_bytes], and its views.

    `fill` is the byte written everywhere (tests poison with it); None leaves memory uninitialised.
    Generations start at zero. `pinned` page-locks the buffer where CUDA allows it; see `is_pinned`.
    """
    buffer = empty_bytes(geometry.buffer_bytes, device, pinned=pinned)
    if fill is not None:
        buffer.fill_(fill)
    buffer[geometry.pages_bytes :] = 0
    tensors, references = _tensors(buffer, geometry)
    return CanonicalKVCaches(buffer, geometry, tensors, references)


def empty_bytes(num_bytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """int8 [num_bytes], on huge pages where the host has them: digests and transfers read all of it and would
    otherwise wait for address translation. `pinned` also page-locks it where CUDA allows that."""
    assert device.type == "cpu" or not pinned, "only host memory is page-locked"
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        pin = pinned and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.int8, device=device, pin_memory=pin)
    memory = _HostMemory(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.int8)
    if pinned and torch.cuda.is_available():
        memory.lock_pages(buffer.data_ptr())
    return buffer


class _HostMemory(mmap.mmap):
    """Anonymous memory that CUDA can page-lock in place; torch's own pinned allocations are rounded up to a
    power of two and use small pages."""

    locked_at: int | None = None

    def lock_pages(self, address: int) -> None:
        cuda: Any = torch.cuda
        failed = cuda.cudart().cudaHostRegister(address, len(self), 0)
        if not int(failed):
            self.locked_at = address

    def __del__(self) -> None:
        # Unlock before unmapping. At interpreter exit CUDA, and the lock with it, may be gone already.
        if self.locked_at is not None:
            cuda: Any = torch.cuda
            with contextlib.suppress(Exception):
                cuda.cudart().cudaHostUnregister(self.locked_at)


def _tensors(
    buffer: torch.Tensor, geometry: RankGeometry
) -> tuple[tuple[torch.Tensor, ...], tuple[tuple[BlockReference, ...], ...]]:
    """Return the tensors that cover the pages, region after region, and each group's references."""
    tensors: list[torch.Tensor] = []
    references: list[tuple[BlockReference, ...]] = []
    for region in geometry.regions:
        pages, first = _pages(buffer, geometry, region), len(tensors)
        if geometry.layout.block_outermost:
            # One tensor holds whole blocks of every group.
            tensors.append(pages.view(geometry.num_blocks, region.block_bytes))
            references += [(BlockReference(first, 0, region.block_bytes),) for _ in region.groups]
            continue
        sizes = list(_tensor_sizes(geometry, region))
        parts = torch.split(pages, [size * geometry.num_blocks for size, _ in sizes])
        tensors += (part.view(geometry.num_blocks, -1) for part in parts)
        references += [
            tuple(
                BlockReference(first + i, 0, size)
                for i, (size, position) in enumerate(sizes)
                if position is None or position < len(geometry.groups[g].layers)
            )
            for g in region.groups
        ]
    return tuple(tensors), tuple(references)


def _pages(buffer: torch.Tensor, geometry: RankGeometry, region: Region) -> torch.Tensor:
    """Return the bytes of a region, int8 [num_blocks * region.block_bytes]."""
    return buffer[region.offset : region.offset + geometry.num_blocks * region.block_bytes]


def _tensor_sizes(geometry: RankGeometry, region: Region) -> Iterator[tuple[int, int | None]]:
    """Yield (bytes of a block, position of the layer it belongs to or None for all) for every index of the
    axes outside B, in order. Padding positions come last."""
    first, around = geometry.groups[region.groups[0]], geometry.layout.around_blocks
    positions = first.num_positions
    if around == "L":
        yield from ((region.block_bytes // positions, position) for position in range(positions))
        return
    # All groups have the first one's bundles here, inside each layer or around all layers.
    outer, inner = ("L", around[1:]) if around[0] == "L" else ("", around)
    for at in product(*(range(positions) for _ in outer)):
        for fields in first.bundles:
            size = fields[0].block_stride * first.kernel_blocks_per_block
            sizes = {"L": positions, "H": len(fields[0].units), "N": first.kernel_block_size}
            for index in product(*(range(sizes[axis]) for axis in inner)):
                yield size, dict(zip(outer + inner, at + index, strict=True)).get("L")


def _bundle_view(
    buffer: torch.Tensor,
    geometry: RankGeometry,
    group: GroupGeometry,
    fields: tuple[FieldGeometry, ...],
    position: int,
) -> torch.Tensor:
    """View one bundle of one layer as [B, U, N, C]."""
    first = fields[0]
    dtypes = {TORCH_DTYPES[f.field.dtype] for f in fields}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    content = sum(f.field.row_bytes for f in fields)
    strides = (first.block_stride, first.unit_stride, first.row_stride)
    offset = first.offset + position * first.layer_stride
    itemsize = dtype.itemsize
    assert all(n % itemsize == 0 for n in (*strides, offset, content)), "unaligned for its dtype"
    shape = (
        geometry.num_blocks * group.kernel_blocks_per_block,
        len(first.units),
        group.kernel_block_size,
        content // itemsize,
    )
    # What lies behind a region may not fill an element: view its pages alone. Elements count from the first
    # byte of the storage.
    pages = _pages(buffer, geometry, geometry.region_of(group.group.index)).view(dtype)
    start = pages.storage_offset() + (offset - geometry.region_of(group.group.index).offset) // itemsize
    return torch.as_strided(pages, shape, (*(s // itemsize for s in strides), 1), start)
