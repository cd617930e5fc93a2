"""How much the Triton kernels compute at once, from facts that the host knows without asking a device."""

from __future__ import annotations

from typing import NamedTuple

from rayk.kernels.target import Target

MAX_SPLITS = 128
"""Programs that one sequence's keys are divided over at most."""
MIN_KEYS_PER_SPLIT = 256
"""Fewer keys take less time than starting a program for them and combining what it found."""


class Tiles(NamedTuple):
    """Compile-time shape of a launch."""

    rows: int
    """Rows of queries (tokens x query heads of a group) in a tile; a power of two."""
    keys: int
    """Keys in a tile; a power of two."""
    num_warps: int
    num_stages: int


def choose_tiles(
    target: Target, *, decode_only: bool, group_size: int, row_elements: int, itemsize: int
) -> Tiles:
    """Tiles that fit the target's shared memory and registers.

    row_elements: the wider of a key and a value, a power of two up to 256. itemsize: bytes of an element as
    it is multiplied. What is chosen here is compiled for every target by tests (no spills, shared memory).
    """
    rows, keys, num_warps, num_stages = _base_tiles(target, decode_only, row_elements, itemsize)
    while rows < group_size:
        rows *= 2
    return Tiles(rows, keys, num_warps, num_stages)


def _base_tiles(target: Target, decode_only: bool, row_elements: int, itemsize: int) -> Tiles:
    if itemsize == 4:
        # Exact float32 products do not use tensor cores: larger tiles, or fewer warps, spill registers.
        return Tiles(16, 32, 8, 2)
    if decode_only:
        return Tiles(16, 64 if row_elements <= 128 else 32, 4, 2)
    return Tiles(64, 64 if row_elements <= 128 else 32, 4, 2)


def choose_num_splits(target: Target, *, num_programs: int, max_keys: int) -> int:
    """How many programs share the keys of one sequence in a decode step.

    num_programs: those of the step without splitting (requests x groups of query heads). max_keys: most
    keys that a token may see. All are fixed while a batch's shape is, so that a CUDA graph can hold the grid.
    """
    wanted = -(-2 * target.num_multiprocessors // max(1, num_programs))
    useful = -(-max_keys // MIN_KEYS_PER_SPLIT)
    return max(1, min(wanted, useful, MAX_SPLITS))
