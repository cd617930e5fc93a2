"""Where vLLM's store kernels put each element of K and V in a block, learned by storing numbered values.

A cache's shape does not tell: the CPU backend keeps K transposed. So the layer's own `do_kv_cache_update`
stores numbers into a scratch cache of the same strides. The places where they turn up are the map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch

from rayk.types.errors import Unsupported

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Stores (keys [tokens, heads, elements], values, cache, slots): element i of the slots takes token i."""

BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "CPU_ATTN": "cpu_attn_reshape_and_cache",
        "FLASH_ATTN": "reshape_and_cache_flash",
        "TRITON_ATTN": "triton_reshape_and_cache_flash",
        "FLASHINFER": "reshape_and_cache_flash",
    }
)
"""vLLM's attention backends that rayk can probe -> the kernel that stores."""
NOT_MEASURED = frozenset(BACKENDS) - {"CPU_ATTN"}
"""Backends whose learned map has not yet been compared with what the kernel writes: they need a GPU."""

_DIGITS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.uint8: 2}
)
"""How many integers, from 0 on, an element holds exactly: the base in which places are numbered. A byte of
fp8 holds values times a scale, so it only tells 0 from 1."""
_UNWRITTEN = {torch.uint8: 0x7F}
"""What no digit is stored as; -1 if not said otherwise. 0x7F is NaN in fp8."""
_BLOCK = 1
"""The scratch block that is stored into, between two that must stay as they are."""


@dataclass(frozen=True, eq=False)
class FieldMap:
    """Places of K or V among the elements of a kernel block, counted in the order of the cache's own axes."""

    index: torch.Tensor
    """int64 [heads, tokens, elements]."""

    @cached_property
    def affine(self) -> tuple[int, tuple[int, ...]] | None:
        """(offset, strides) if places are linear in head, token and element, else None."""
        offset = int(self.index[0, 0, 0])
        steps = [
            int(self.index.select(a, 1)[0, 0]) - offset if n > 1 else 0 for a, n in enumerate(self.shape)
        ]
        linear = torch.full((), offset, device=self.index.device)
        for axis, (size, step) in enumerate(zip(self.shape, steps, strict=True)):
            shape = [1] * axis + [size] + [1] * (2 - axis)
            linear = linear + (torch.arange(size, device=self.index.device) * step).view(shape)
        return (offset, tuple(steps)) if torch.equal(linear, self.index) else None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.index.shape)

    def __str__(self) -> str:
        """List the axes from the outermost in, with their strides."""
        if self.affine is None:
            return "by a table"
        offset, strides = self.affine
        axes = sorted(zip(strides, ("head", "token", "element"), strict=True), reverse=True)
        return f"from {offset}: " + ", ".join(f"{name} {stride}" for stride, name in axes)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Read [blocks, elements of a block] as [blocks, heads, tokens, elements], elements dense."""
        if self.affine is None:
            return blocks[:, self.index]
        offset, strides = self.affine
        view = blocks.as_strided(
            (len(blocks), *self.shape), (blocks.stride(0), *strides), blocks.storage_offset() + offset
        )
        return view if view.stride(-1) == 1 else view.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Says where K and V lie in a kernel block. Every element of the block is one of theirs."""

    keys: FieldMap
    values: FieldMap


def store_of(layer: Any) -> Store:
    """Call the store kernel of one of vLLM's attention layers as the layer does.

    Raises Unsupported for a backend that rayk has no probe of.
    """
    name = layer.attn_backend.get_name()
    if name not in BACKENDS:
        raise Unsupported(
            f"attention backend {name}: rayk has no probe of its store kernel; choose one of "
            f"{', '.join(BACKENDS)} with vLLM's --attention-backend"
        )
    return partial(layer.impl.do_kv_cache_update, layer)


def learn_block_map(
    store: Store, cache: torch.Tensor, num_heads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> BlockMap:
    """Learn the map of a layer's cache, [kernel blocks, heads, tokens, content], which is left untouched.

    `sizes`: elements of a key and of a value, which the layer computes in `dtype`. Raises Unsupported unless
    the store writes every element of its own block exactly once, and nothing else.
    """
    num_tokens = int(cache.shape[2])
    scratch = _scratch_like(cache)
    counts = [num_tokens * num_heads * size for size in sizes]
    if scratch[_BLOCK].numel() != sum(counts):
        raise Unsupported(
            f"a block of {scratch[_BLOCK].numel()} elements, where K and V of {num_heads} heads and "
            f"{num_tokens} tokens have {sum(counts)}: rayk proves blocks without padding or scales"
        )
    numbers = torch.arange(sum(counts), device=cache.device)
    shapes = [(num_tokens, num_heads, size) for size in sizes]
    found = _store_numbers(store, scratch, torch.split(numbers, counts), shapes, dtype)
    if not torch.equal(found.sort().values, numbers):
        raise Unsupported("vLLM's store kernel does not write each element of a block exactly once")
    places = torch.empty_like(numbers)
    places[found] = numbers
    keys, values = (
        part.view(num_tokens, num_heads, size).transpose(0, 1).contiguous()
        for part, size in zip(torch.split(places, counts), sizes, strict=True)
    )
    return BlockMap(FieldMap(keys), FieldMap(values))


def _store_numbers(
    store: Store,
    scratch: torch.Tensor,
    numbers: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Store `numbers` of K and of V, and read which one each element of the block holds. They are stored
    digit by digit, in as many passes as the cache's dtype needs."""
    if scratch.dtype not in _DIGITS:
        raise Unsupported(f"a KV cache of {scratch.dtype}: rayk proves {', '.join(map(str, _DIGITS))}")
    base, unwritten = _DIGITS[scratch.dtype], _UNWRITTEN.get(scratch.dtype, -1)
    num_tokens = shapes[0][0]
    slots = _BLOCK * num_tokens + torch.arange(num_tokens, device=scratch.device)
    neighbours = [i for i in range(len(scratch)) if i != _BLOCK]
    found = torch.zeros(scratch[_BLOCK].numel(), dtype=torch.int64, device=scratch.device)
    unit = 1
    while unit <= int(numbers[-1][-1]):
        scratch.fill_(unwritten)
        keys, values = (
            (n // unit % base).to(dtype).view(shape) for n, shape in zip(numbers, shapes, strict=True)
        )
        store(keys, values, scratch, slots)
        written = scratch[_BLOCK].reshape(-1)
        if bool((written == unwritten).any()) or bool((scratch[neighbours] != unwritten).any()):
            raise Unsupported(
                "vLLM's store kernel does not write all of a block and nothing of its neighbours"
            )
        found += (written.to(torch.int64) if base > 2 else (written != 0)) * unit
        unit *= base
    return found


def _scratch_like(cache: torch.Tensor) -> torch.Tensor:
    """Make three blocks with the strides of the cache. Where blocks are not outermost these strides would
    span the whole cache, so the blocks are dense there, with the same order of axes."""
    shape, strides = (3, *cache.shape[1:]), cache.stride()
    if strides[0] < max(strides):
        outermost_first = sorted(range(cache.dim()), key=lambda axis: -strides[axis])
        dense = torch.empty([shape[a] for a in outermost_first], dtype=cache.dtype, device=cache.device)
        return dense.permute([outermost_first.index(axis) for axis in range(cache.dim())])
    return torch.empty_strided(shape, strides, dtype=cache.dtype, device=cache.device)
