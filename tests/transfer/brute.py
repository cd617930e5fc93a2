"""Rank buffers filled from a layout's definition alone: nothing here comes from rayk.kv's address arithmetic.

A buffer is an integer array with one element per byte of the real one. Element values are coordinates:
a number that names (layer, unit, token, byte of the content) and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNKNOWN = -1


def brute_shard(num_units: int, tp_size: int, tp_rank: int, readers: int) -> list[int]:
    """Units whose readers (consecutive, evenly dealt) live on this rank; by looking at every reader."""
    units = []
    for reader in range(readers):
        if reader // (readers // tp_size) == tp_rank:
            unit = reader // (readers // num_units)
            if unit not in units:
                units.append(unit)
    return units


@dataclass(frozen=True)
class BruteRank:
    """One group of one rank: where its axes lie and how large they are."""

    layout: str
    num_positions: int
    num_layers: int
    units: list[int]
    block_size: int
    kernel_block_size: int
    content: int
    num_blocks: int

    def buffer(self, coordinates: np.ndarray, table: list[int], rows: range) -> np.ndarray:
        """The rank's pages, flat, holding `coordinates` [layer, unit, token, byte] of `rows` at the blocks
        of `table`, UNKNOWN elsewhere."""
        ratio = self.block_size // self.kernel_block_size
        logical = np.full(
            (
                self.num_positions,
                self.num_blocks * ratio,
                len(self.units),
                self.kernel_block_size,
                self.content,
            ),
            UNKNOWN,
            dtype=np.int64,
        )
        for token in rows:
            block, slot = table[token // self.block_size], token % self.block_size
            kernel_block = block * ratio + slot // self.kernel_block_size
            kernel_slot = slot % self.kernel_block_size
            logical[: self.num_layers, kernel_block, :, kernel_slot] = coordinates[:, self.units, token]
        order = ["LBHNC".index(axis) for axis in self.layout]
        if self.layout[0] != "B":
            return np.ascontiguousarray(np.moveaxis(logical, order, range(5))).reshape(-1)
        # Inside a block, positions without a layer come last of all, whatever the order of the axes.
        used = np.moveaxis(logical[: self.num_layers], order, range(5)).reshape(self.num_blocks * ratio, -1)
        pages = np.full((self.num_blocks * ratio, logical[:, 0].size), UNKNOWN, dtype=np.int64)
        pages[:, : used.shape[1]] = used
        return pages.reshape(-1)


def coordinates(num_layers: int, num_units: int, num_tokens: int, content: int) -> np.ndarray:
    """A different number for every (layer, unit, token, byte)."""
    shape = (num_layers, num_units, num_tokens, content)
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
