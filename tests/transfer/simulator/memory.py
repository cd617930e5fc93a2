"""Blocks of one life of an engine: who holds them, and what was written into them by whom.

A right row names request, layer, head and token, so that right and wrong are told apart without any model.
The pool is as nasty as it can be: a block that is given back is handed to somebody else at once, its
generation counted and its rows overwritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.parallel.shard import EngineShape
from rayk.transfer.connectors import layer_views
from rayk.transfer.layer_view import LayerView
from tests.transfer.simulator.requests import HEADS, Model

NUM_BLOCKS = 24
POISON = 0x5A
FOREIGN = -1.0
WRONG = -2.0
"""What is computed from something wrong."""
Tables = tuple[tuple[int, ...], ...]


@functools.cache
def _geometry(model: Model, layout: str, tp: int, rank: int) -> RankGeometry:
    sizes = kernel_block_sizes(model.groups, None, {})
    return plan_rank(
        model.groups,
        LAYOUTS[layout],
        shape=EngineShape(tp),
        rank=rank,
        num_blocks=NUM_BLOCKS,
        kernel_block_sizes=sizes,
    )


@dataclass(frozen=True, eq=False)
class _Pages:
    """What one rank keeps of one field of a layer for one head."""

    values: np.ndarray
    """[block, unit of the rank, row, element], the rank's memory itself."""
    units: slice

    def rows(self, block: int, first: int, stop: int) -> np.ndarray:
        return self.values[block, self.units, first:stop]


class Memory:
    """The caches of all ranks of an engine."""

    def __init__(self, name: str, model: Model, layout: str, tp: int, violate: Callable[[str], None]) -> None:
        """`violate` is told of what must not happen."""
        self.name = name
        self.model = model
        self.holders: list[str | None] = [None] * NUM_BLOCKS
        self.num_taken = 0
        self.num_freed = 0
        self.caches: list[CanonicalKVCaches] = []
        self.views: list[list[LayerView]] = []
        for rank in range(tp):
            caches = allocate(_geometry(model, layout, tp, rank), torch.device("cpu"), fill=POISON)
            self.caches.append(caches)
            self.views.append(list(layer_views(caches)))
        self._pages: dict[tuple[int, int], list[_Pages]] = {}
        """(layer, head) -> fields, each as the rank has it that holds the head."""
        for views in self.views:
            for view in views:
                for field in view.fields:
                    self._add(view.layer, field.view.numpy(), field.units)
        self._generations = [caches.generations.numpy() for caches in self.caches]
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))
        self._violate = violate

    def _add(self, layer: int, values: np.ndarray, units: tuple[int, ...]) -> None:
        num_units = self.model.num_units(layer)
        for head in HEADS:
            mine = [i for i, unit in enumerate(units) if unit * len(HEADS) // num_units == head]
            if mine:
                found = self._pages.setdefault((layer, head), [])
                found.append(_Pages(values, slice(mine[0], mine[-1] + 1)))

    @property
    def num_held(self) -> int:
        """Blocks that somebody has."""
        return self.num_taken - self.num_freed

    def take(self, holder: str, counts: Iterable[tuple[int, int]]) -> Tables | None:
        """Block tables of (null blocks, entries in all), as their blocks were left; None when there are too
        few."""
        counts = tuple(counts)
        num = sum(total - first for first, total in counts)
        if num > len(self._free):
            return None
        tables = tuple((0,) * first + tuple(self._hand_out(holder, total - first)) for first, total in counts)
        self.num_taken += num
        return tables

    def _hand_out(self, holder: str, count: int) -> Iterator[int]:
        for _ in range(count):
            block = self._free.pop()
            assert self.holders[block] is None, f"{self.name}: block {block} is taken"
            self.holders[block] = holder
            self._count(block)
            yield block

    def give(self, holder: str, tables: Tables) -> None:
        """Blocks are needed no longer: somebody else has them at once, and fills them."""
        for block in (block for table in tables for block in table if block):
            if self.holders[block] != holder:
                self._violate(f"{self.name}: block {block} of {holder} was freed twice")
                continue
            self.holders[block] = None
            self._count(block)
            self.num_freed += 1
            self._free.insert(0, block)
            for fields in self._pages.values():
                for pages in fields:
                    pages.values[block] = FOREIGN

    def _count(self, block: int) -> None:
        for generations in self._generations:
            generations[block] += 1

    def holds(self, layer: int, head: int, block: int, first: int, values: np.ndarray) -> bool:
        """Whether rows of a block, from `first` on, are these."""
        stop = first + len(values)
        return all(
            (pages.rows(block, first, stop) == values[:, None]).all() for pages in self._pages[layer, head]
        )

    def write(self, holder: str, layer: int, head: int, block: int, first: int, values: np.ndarray) -> None:
        """Rows of a block from `first` on, by somebody who believes that it is `holder`'s."""
        if self.holders[block] != holder:
            owner = self.holders[block] or "somebody else"
            self._violate(f"{self.name}: a write of {holder} into block {block}, which is {owner}'s")
            return
        for pages in self._pages[layer, head]:
            pages.rows(block, first, first + len(values))[:] = values[:, None]
