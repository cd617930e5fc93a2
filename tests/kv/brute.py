"""Where bytes lie by a layout's definition: numpy's own axis order, no stride arithmetic.

A rank's memory is numbered byte by byte, cut into axes in the layout's order, and the axes are then named
by transposing. Beside it, `owner` says by looping what every byte is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import Coordinate, RankGeometry, plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec

Ints = npt.NDArray[np.int64]


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


@dataclass(frozen=True)
class Case:
    """A cache to lay out; `kernel` is the kernel block size, None for the manager's."""

    name: str
    specs: dict[int, FullAttentionSpec]
    tp_size: int
    kernel: int | None
    num_blocks: int = 3

    def __str__(self) -> str:
        return self.name

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        return group_layers(self.specs)

    @property
    def is_padded(self) -> bool:
        """Groups of unlike pages: LHBNC cannot hold them."""
        return len({(s.num_kv_heads, s.head_size_k + s.head_size_v) for s in self.specs.values()}) > 1

    def rank(self, layout: str, tp_rank: int, num_blocks: int | None = None) -> RankGeometry:
        return plan_rank(
            self.groups,
            LAYOUTS[layout],
            tp_size=self.tp_size,
            tp_rank=tp_rank,
            num_blocks=num_blocks or self.num_blocks,
            kernel_block_size=self.kernel,
        )


_FLOAT = full(head_k=2, head_v=1, dtype="float32")
_HALF = full(kv_heads=4, dtype="float16")
_NARROW = full(head_k=8, head_v=8)
_WIDE = full(head_k=16, head_v=16)
_ODD = full(kv_heads=1)
_HYBRID = {0: full(), 1: full(), 2: sliding(3), 3: sliding(3), 4: sliding(3)}

CASES = [
    Case("one-group", {0: full(), 5: full()}, 1, None),
    Case("one-group-kernel-2", {0: full(), 5: full()}, 2, 2),
    Case("replicated", {0: full(), 1: full()}, 4, None),
    Case("uneven", {0: full(), 1: full()}, 3, 2),
    Case("position-padding", _HYBRID, 2, 2),
    Case("float32", {0: _FLOAT, 1: _FLOAT}, 1, 1),
    Case("head-sizes-8-16", {0: _NARROW, 1: _NARROW, 2: sliding(5, _WIDE), 3: sliding(5, _WIDE)}, 2, 2),
    Case("unlike-heads", {0: _HALF, 1: sliding(5, full(kv_heads=1, dtype="float16"))}, 2, None),
    Case("unlike-heads-tp4", {0: full(kv_heads=4), 1: full(), 2: full(kv_heads=4), 3: full()}, 4, 2),
    # Pages of 20 and 16 bytes that must hold whole float32: 24.
    Case("unlike-dtypes", {0: _ODD, 1: full(2, 1, 1, 1, "float32")}, 1, 1),
]

RANK_CASES = [
    (case, layout, rank)
    for case in CASES
    for layout in LAYOUTS
    if not (case.is_padded and layout == "LHBNC")
    for rank in range(case.tp_size)
]


def ident(value: object) -> str:
    """Readable ids for pytest."""
    return str(value)


def brute_units(spec: FullAttentionSpec, tp_size: int, tp_rank: int) -> list[int]:
    """KV heads of the query heads that are dealt to this rank, by asking every query head."""
    mine = []
    for query in range(spec.num_query_heads):
        if query // (spec.num_query_heads // tp_size) == tp_rank:
            head = query // (spec.num_query_heads // spec.num_kv_heads)
            if head not in mine:
                mine.append(head)
    return mine


def content_bytes(spec: FullAttentionSpec) -> int:
    """Bytes of K and V of one token and head."""
    return (spec.head_size_k + spec.head_size_v) * np.dtype(spec.dtype).itemsize


def brute_addresses(case: Case, layout: str, tp_rank: int) -> list[Ints]:
    """Per group, the byte addresses [L, B, H, N, C] of everything one rank holds (L: the real layers)."""
    shapes = []
    for g in case.groups:
        kernel = case.kernel or g.spec.block_size
        units = brute_units(_spec(g), case.tp_size, tp_rank)
        axes = {
            "L": g.num_positions,
            "B": case.num_blocks * g.spec.block_size // kernel,
            "H": len(units),
            "N": kernel,
            "C": content_bytes(_spec(g)),
        }
        shapes.append(axes)
    page = _padded_page(case, shapes)
    return [
        _numbered(layout, axes, page, case.num_blocks)[: len(g.layers)]
        for g, axes in zip(case.groups, shapes, strict=True)
    ]


def _padded_page(case: Case, shapes: Sequence[dict[str, int]]) -> int:
    """The smallest page that holds any group's and that all of them can cut into whole kernel blocks."""
    ratios = [s["B"] // case.num_blocks for s in shapes]
    sizes = [r * s["H"] * s["N"] * s["C"] for r, s in zip(ratios, shapes, strict=True)]
    steps = [r * np.dtype(_spec(g).dtype).itemsize for r, g in zip(ratios, case.groups, strict=True)]
    return next(n for n in range(max(sizes), 10**6) if all(n % step == 0 for step in steps))


def _numbered(layout: str, axes: dict[str, int], page: int, num_blocks: int) -> Ints:
    """Byte numbers [L, B, H, N, C]; padding, if any, ends each kernel block."""
    ratio = axes["B"] // num_blocks
    memory = np.arange(page * axes["L"] * num_blocks)
    if layout.startswith("B"):
        used = axes["L"] * axes["H"] * axes["N"] * axes["C"]
        memory = memory.reshape(axes["B"], -1)[:, :used]
    elif layout.startswith("LB"):
        used = axes["H"] * axes["N"] * axes["C"]
        memory = memory.reshape(axes["L"], axes["B"], page // ratio)[:, :, :used]
    memory = memory.reshape([axes[a] for a in layout])
    return memory.transpose([layout.index(a) for a in "LBHNC"])


def brute_owners(case: Case, layout: str, tp_rank: int) -> dict[int, list[Coordinate]]:
    """Byte address -> its coordinates, one per group that uses it; padding is absent."""
    owners: dict[int, list[Coordinate]] = {}
    for g, addresses in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        spec = _spec(g)
        units = brute_units(spec, case.tp_size, tp_rank)
        kernel = addresses.shape[3]
        ratio = spec.block_size // kernel
        k_bytes = spec.head_size_k * np.dtype(spec.dtype).itemsize
        for (layer, block, head, slot, byte), address in np.ndenumerate(addresses):
            coordinate = Coordinate(
                group=g.index,
                layer=g.layers[layer],
                field="k" if byte < k_bytes else "v",
                unit=units[head],
                row=(block % ratio) * kernel + slot,
                byte=byte if byte < k_bytes else byte - k_bytes,
                block=block // ratio,
            )
            owners.setdefault(int(address), []).append(coordinate)
    return owners


def _spec(group: KVCacheGroup) -> FullAttentionSpec:
    assert isinstance(group.spec, FullAttentionSpec)
    return group.spec
