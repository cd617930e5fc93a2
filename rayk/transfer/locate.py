"""Where a producer keeps some rows: what a consumer got instead of what it asked for.

A read that brought wrong content brought somebody's. The producer looks for it among all blocks of that
layer, through the views its kernels use; who holds the blocks it lies in now, its block manager knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rayk.transfer.layer_view import LayerView
from rayk.types.errors import KVMismatch

MAX_SEARCHED_BYTES = 1 << 30
"""Most bytes of one field and unit of a layer: a longer search would keep an engine from its work."""
_CHUNK_BYTES = 4 << 20
MAX_PLACES = 4


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Says where rows lie in a producer rank's cache."""

    rank: int
    block: int
    """The manager's."""
    row: int
    """Row of the block in which the first of them lies."""
    num_rows: int
    """How many of those looked for lie there in a row."""
    generation: int


def find_rows(
    view: LayerView, field: str, unit: int, rows: Sequence[bytes], rank: int, generations: torch.Tensor
) -> list[FoundRows]:
    """List places of one of a layer's caches that hold `rows` (in order of position), best first; a few at
    most.

    None where this rank holds no such unit, or where the rows could be anybody's (all bytes equal). The first
    row must be there; how many of the next follow it in the same block is counted.
    """
    seen = next(f for f in view.fields if f.name == field)
    if unit not in seen.units or not rows or len(set(rows[0])) <= 1:
        return []
    memory = seen.view[:, seen.units.index(unit)]  # [kernel blocks, rows, elements]
    size = view.kernel_block_size
    ratio = view.block_rows // size
    places = []
    for kernel_block, slot in _matches(memory, rows[0]):
        block, part = divmod(kernel_block, ratio)
        here = _bytes(memory[block * ratio : (block + 1) * ratio]).reshape(ratio * size, -1)
        first = part * size + slot
        count = 0
        for wanted, found in zip(rows, here[first:], strict=False):
            if found.numpy().tobytes() != wanted:
                break
            count += 1
        places.append(FoundRows(rank, block, first, count, int(generations[block])))
    return sorted(places, key=lambda p: -p.num_rows)[:MAX_PLACES]


def _matches(memory: torch.Tensor, row: bytes) -> Iterator[tuple[int, int]]:
    """Yield (kernel block, row) of every row that equals `row`."""
    wanted = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(memory.device)
    block_bytes = max(1, memory.shape[1] * len(row))
    step = max(1, _CHUNK_BYTES // block_bytes)
    searched = min(len(memory), MAX_SEARCHED_BYTES // block_bytes)
    for begin in range(0, searched, step):
        equal = (_bytes(memory[begin : begin + step]) == wanted).all(-1)
        for block, slot in equal.nonzero().tolist():
            yield begin + block, slot


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View [blocks, rows, elements] as uint8 [blocks, rows, bytes]."""
    dense = values.clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8).view(*values.shape[:2], -1)


def classify_places(
    mismatch: KVMismatch,
    places: Sequence[FoundRows],
    block_table: Sequence[int],
    holders: Mapping[int, str],
) -> str:
    """Return what wrong content is, given where the producer has it.

    `block_table`: the request's own in the group, at the producer; `holders`: block -> the request that holds
    it now, absent where nobody does.
    """
    what = mismatch.classification
    if not mismatch.found_rows:
        return what
    tokens = f"tokens from {mismatch.token} on hold"
    if not places:
        if mismatch.is_tail:
            return f"tail not written: {tokens} what lay there before, which is not the producer's"
        return f"{what}, which no block of the producer holds"
    best = places[0]
    where = f"block {best.block} of producer rank {best.rank}"
    if best.block in block_table:
        return f"{tokens} block {block_table.index(best.block)} of the sequence ({where})"
    if best.block in holders:
        return f"another request's block: {tokens} {where}, which {holders[best.block]} holds"
    # Whether this side's page was not written, or the other's was read too late, content cannot tell.
    kind = "tail not written" if mismatch.is_tail else "stale generation"
    return (
        f"{kind}: {tokens} what an earlier request left (in {where}, free now, generation {best.generation})"
    )
