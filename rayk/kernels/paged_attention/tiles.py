"""Tile sizes of the Triton attention kernels, from facts that the host knows without asking a device."""

from __future__ import annotations

from typing import NamedTuple

from rayk.kernels.target import Target

MAX_SPLITS = 128
"""Most programs that share one sequence's keys."""
MIN_KEYS_PER_SPLIT = 256
"""Fewer keys take less time than starting a program for them and combining its result."""
KEYS_TO_START = 64
"""Keys that a program could have read in the time that it takes to start and to leave its result."""


class Tiles(NamedTuple):
    rows: int
    """Query rows (tokens x query heads of a group), a power of two."""
    keys: int
    """Keys, a power of two."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """A limit for NVIDIA's assembler, which otherwise spills a few to fit one more program."""


def choose_tiles(
    target: Target,
    *,
    decode_only: bool,
    group_size: int,
    row_elements: int,
    itemsize: int,
    quantised: bool = False,
    is_plain: bool = False,
    is_partial: bool = False,
) -> Tiles:
    """Choose tiles that fit the target's shared memory and registers.

    row_elements: the wider of a key and a value, a power of two up to 256. itemsize: bytes of an element when
    multiplied. quantised: keys and values are decoded first. is_plain: no window, sinks, soft cap or masks of
    odd sizes take registers. is_partial: bounds of each row do. `make kernels` shows the registers of each
    choice, and fails if one spills.
    """
    if quantised:
        tiles = _decoding_tiles(target, row_elements, itemsize, decode_only=decode_only)
    elif itemsize == 4:
        tiles = _exact_tiles(target, row_elements)
    elif decode_only:
        # 16 rows, the smallest a tensor core takes, hold the query heads of one KV head.
        if target.is_amd:
            tiles = Tiles(16, 32 if row_elements <= 128 else 16, 4, 1)
        else:
            # Few keys, so that several programs, each with two tiles in flight, share a multiprocessor.
            tiles = Tiles(16, 32, 4, 3, 255)
    else:
        tiles = _prefill_tiles(target, row_elements, is_plain=is_plain, is_partial=is_partial)
    rows = tiles.rows
    while rows < group_size:
        rows *= 2
    return tiles._replace(rows=rows)


def _exact_tiles(target: Target, row_elements: int) -> Tiles:
    """Choose tiles for exact float32 products, without tensor cores: larger tiles, or fewer warps, spill
    registers."""
    if target.is_amd:
        return Tiles(16, 32 if row_elements <= 128 else 16, 8, 1)
    return Tiles(16, 32, 8, 2 if row_elements <= 128 else 1, 255)


def _prefill_tiles(target: Target, row_elements: int, *, is_plain: bool, is_partial: bool) -> Tiles:
    """Choose tiles of at least 64 rows, which a warp group multiplies at once on sm_90 (wgmma) and sm_100
    (tcgen05), wherever there is one."""
    if target.is_amd:
        # A pipeline, or more keys, would keep masks in more scalar registers than there are.
        return Tiles(64, 16, 4, 1)
    if row_elements > 128:
        # 64 rows are a few registers short with bounds of each.
        rows = 32 if is_partial and not target.has_warp_group_mma else 64
        return Tiles(rows, 32, 8, 3 if target.has_room else 2, 255)
    if target.name == "sm_90":
        return Tiles(128, 128 if is_plain else 64, 8, 3)
    if target.has_warp_group_mma:
        return Tiles(128, 64 if is_plain else 32, 8, 3, 255)
    return Tiles(64, 64, 8, 3)


def _decoding_tiles(target: Target, row_elements: int, itemsize: int, *, decode_only: bool) -> Tiles:
    """Choose tiles of fewer keys: their codes, scales and decoded elements are in registers together."""
    is_wide = row_elements > 128
    if itemsize == 4:
        return Tiles(16, 16, 8, 1) if target.is_amd else Tiles(16, 16, 8, 1, 255)
    if target.is_amd:
        return Tiles(16 if decode_only else 64, 16, 4, 1)
    if decode_only:
        return Tiles(16, 32, 4, 3, 255)
    if is_wide and not target.has_warp_group_mma:
        return Tiles(32, 16, 4, 3, 255)
    return Tiles(64, 16 if is_wide else 32, 8, 3, 255)


def choose_num_splits(
    target: Target, *, num_programs: int, max_keys: int, tile_keys: int, programs_at_once: int
) -> int:
    """Say how many programs share the keys of one sequence in a decode step: as many as end soonest, counting
    the device's waves and the keys that a program of each has, and prefer fewer.

    num_programs: programs without splitting (requests x groups of query heads). max_keys: most keys that a
    token may see. Both are fixed with a batch's shape, so that a CUDA graph can hold the grid.
    programs_at_once: those that a multiprocessor holds.
    """
    at_once = target.num_multiprocessors * max(1, programs_at_once)

    def time(num_splits: int) -> int:
        keys = -(-max_keys // num_splits // tile_keys) * tile_keys
        return num_waves(num_programs * num_splits, at_once) * (keys + KEYS_TO_START)

    useful = max(1, min(-(-max_keys // MIN_KEYS_PER_SPLIT), MAX_SPLITS))
    return min(range(1, useful + 1), key=time)


def num_waves(num_programs: int, at_once: int) -> int:
    """Count how often a device that holds `at_once` programs is filled."""
    return -(-num_programs // at_once)
