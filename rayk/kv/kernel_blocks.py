"""The part of a block that attention kernels address: choosing and checking its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import rows_per_block


@dataclass(frozen=True, slots=True)
class BadKernelBlocks:
    """Why kernel blocks cannot be what a setting asks for."""

    setting: str
    """kernel_block_size or kernel_block_sizes."""
    problem: str
    mend: str


def kernel_block_sizes(
    groups: Sequence[KVCacheGroup],
    default: int | None,
    by_kind: Mapping[str, int],
    chunks: Sequence[Sequence[int]] | None = None,
    dcp: int = 1,
) -> tuple[int, ...]:
    """Choose the rows of a kernel block per group: by kind, else `default`, else a whole block.

    `chunks`: per group, the chunk lengths of its layers. Each chunk must begin with a kernel block, so that
    kernel blocks become parts of a block where chunks do not begin with a whole one. Where `dcp` ranks share
    tokens, kernels are told each token's keys instead, and see a rank's own rows.
    """
    sizes = []
    for g, lengths in zip(groups, chunks or [()] * len(groups), strict=True):
        # A drafter has all tokens on each rank.
        rows = rows_per_block(g.spec) // (dcp if g.spec.has_token_rows and g.rides is None else 1)
        size = by_kind.get(g.spec.kind) or default or gcd(rows, *(lengths if dcp == 1 else ()))
        sizes.append(size if g.spec.has_token_rows else rows)
    return tuple(sizes)


def bad_kernel_blocks(
    groups: Sequence[KVCacheGroup],
    default: int | None,
    by_kind: Mapping[str, int],
    chunks: Sequence[Sequence[int]],
    block_size: int,
    dcp: int = 1,
) -> BadKernelBlocks | None:
    """Return the first thing that is wrong with the requested sizes, or None.

    A kernel block must divide its group's blocks and its layers' chunks, and kinds must name groups of the
    model. `block_size`: tokens of a block before it grew. With `dcp`, blocks are one rank's, and chunks
    do not count.
    """
    blocks = {g.spec.kind: g.spec.block_size for g in groups if g.rides is not None}
    blocks |= {
        g.spec.kind: g.spec.block_size // dcp for g in groups if g.spec.has_token_rows and g.rides is None
    }
    for kind in by_kind:
        if kind not in blocks:
            return BadKernelBlocks(
                "kernel_block_sizes",
                f"kernel_block_sizes names {kind} groups, and the model has none",
                f"it has {', '.join(blocks)}" if blocks else "it keeps states only, whose blocks are whole",
            )
    lengths: dict[str, set[int]] = {kind: set() for kind in blocks}
    for g, of_group in zip(groups, chunks if dcp == 1 else [()] * len(groups), strict=True):
        lengths.get(g.spec.kind, set()).update(of_group)
    for kind, size in blocks.items():
        rows = by_kind.get(kind, default)
        if rows is None:
            continue
        setting = "kernel_block_sizes" if kind in by_kind else "kernel_block_size"
        if size % rows:
            grown = f", to which blocks of {block_size} grow in {kind} groups" if size != block_size else ""
            return BadKernelBlocks(
                setting,
                f"kernel_block_size {rows} does not divide block_size {size}{grown}",
                f"a divisor of {size}",
            )
        if any(length % rows for length in lengths[kind]):
            return BadKernelBlocks(
                setting,
                f"kernel_block_size {rows} does not divide the chunks of "
                f"{' and '.join(map(str, sorted(lengths[kind])))} positions that layers of {kind} groups see",
                f"a divisor of {gcd(size, *lengths[kind])}, or leave it out (it is that then)",
            )
    return None
