"""A rank's outbox: host memory into which it copies what it stores, for the host tier to read there.

What copies between devices does not reach a host's memory, so a GPU's rank fills pinned memory itself, on a
stream of its own, and its own blocks are free as soon as that has run. The outbox is a cache of few blocks,
with generations: the tier reads it like any rank's, and digests that were made of the rank's own blocks prove
what arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.copy_runs import RunTable, copy_runs, make_run_table
from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.caches import CanonicalKVCaches, allocate, empty_bytes
from rayk.kv.geometry import GroupGeometry, Region
from rayk.kv.maps import block_strides, match_rows
from rayk.kv.outbox import outbox_geometry
from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.staging import own_stream

Ints = npt.NDArray[np.int64]
BlockTables = Sequence[Sequence[int]]
CHUNK_BYTES = 8 << 20
"""Blocks are brought into the outbox's order on the device, so many bytes at once, and copied from there."""


def outbox_name(engine: str) -> str:
    """Return the name by which tickets and handshakes know an engine's outboxes. The engine's own comes
    before the first tilde."""
    return f"{engine}~outbox"


class Outbox:
    """Blocks are handed out by the engine's rank 0, alike on all ranks."""

    def __init__(self, agent: TransferAgent, caches: CanonicalKVCaches, num_bytes: int) -> None:
        """`caches`: the rank's own. Register it before the rank is described: what an agent says of itself
        covers what is registered by then. Raises UserError for an outbox that holds no block of each group.
        """
        geometry, self._device = outbox_geometry(caches.geometry, num_bytes), caches.buffer.device
        self._own = caches
        pinned = self._device.type == "cuda"
        self.caches = allocate(geometry, torch.device("cpu"), fill=None, pinned=pinned)
        self._base_address = agent.register(self.caches.buffer)
        self._tables = [
            _run_table(own, there, geometry.region_of(index), self._device)
            for index, (own, there) in enumerate(zip(caches.geometry.groups, geometry.groups, strict=True))
        ]
        most_bytes = max(region.block_bytes for region in geometry.regions)
        self._chunk_blocks = max(1, CHUNK_BYTES // most_bytes)
        self._chunk = empty_bytes(self._chunk_blocks * most_bytes, self._device)
        self._own_stream = own_stream(self._device)
        self._lock = threading.Lock()
        """Stores are copied by another thread than what is handed over."""

    def describe(self, rank: CacheDescription) -> CacheDescription:
        """Describe the outbox of this rank, for whoever reads it."""
        return replace(
            rank,
            engine=outbox_name(rank.engine),
            geometry=self.caches.geometry,
            device="cpu",
            base_address=self._base_address,
        )

    def hand_out(self, tables: BlockTables) -> tuple[tuple[int, ...], ...]:
        """Count that these blocks are handed out, before anything is copied there; returns their generations
        by group, as a ticket carries them."""
        self.caches.bump_generations([b for table in tables for b in table if b != NULL_BLOCK])
        known = self.caches.generations.numpy()
        return tuple(tuple(known[list(table)].tolist()) for table in tables)

    @contextmanager
    def copying(self, own_tables: BlockTables, tables: BlockTables) -> Iterator[None]:
        """Copy what the tables say, see `copy`, and do what the body does in the same stream, beside steps.
        At its end the copies have run."""
        with self._own_stream():
            self.copy(own_tables, tables)
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def copy(self, own_tables: BlockTables, tables: BlockTables) -> None:
        """Queue the copy of the rank's own blocks to those of the outbox that stand at the same places of
        its tables; where these have null blocks nothing is copied. In the current stream."""
        for index, (runs, own, there) in enumerate(zip(self._tables, own_tables, tables, strict=True)):
            region, to = self.caches.geometry.region_of(index), np.asarray(there, dtype=np.int64)
            chosen = np.flatnonzero(to != NULL_BLOCK)
            source, to = np.asarray(own, dtype=np.int64)[chosen], to[chosen]
            assert np.all(source != NULL_BLOCK), "a null block holds nothing to be copied"
            for first in range(0, len(to), self._chunk_blocks):
                part = slice(first, first + self._chunk_blocks)
                with self._lock:
                    self._copy(runs, region, source[part], to[part])

    def _copy(self, runs: RunTable, region: Region, source: Ints, to: Ints) -> None:
        copy_runs(self._own.buffer, self._chunk, runs, source, np.arange(len(source), dtype=np.int64))
        size = region.block_bytes
        for first, stop in _consecutive(to):
            there = self.caches.buffer[region.offset + int(to[first]) * size :][: (stop - first) * size]
            there.copy_(self._chunk[first * size : stop * size], non_blocking=True)


def _run_table(own: GroupGeometry, there: GroupGeometry, region: Region, device: torch.device) -> RunTable:
    """Make the table of a group's runs from one of the rank's own blocks to one of the outbox, counted from
    the start of its region there."""
    units = {f.field.name: f.units for f in own.fields}
    runs = match_rows(own, there, units, source_row=0, destination_row=0, num_rows=own.block_rows)
    strides = block_strides(own, runs.source), block_strides(there, runs.destination)
    return make_run_table(runs.source, runs.destination - region.offset, runs.lengths, *strides, device)


def _consecutive(blocks: Ints) -> Iterator[tuple[int, int]]:
    """Yield (first, one behind the last) place of each stretch of consecutive blocks."""
    borders = np.flatnonzero(np.diff(blocks) != 1) + 1
    ends = [0, *borders.tolist(), len(blocks)]
    yield from zip(ends[:-1], ends[1:], strict=True)
