"""Which bytes each consumer rank reads from which producer rank. Pure; free of torch.

A plan goes through canonical coordinates: of every field, every unit a consumer rank holds has one elected
source rank that holds it too, and rows are cut wherever a block of either side ends, so that a segment lies
in one block on both sides. Segments that lie alike in both blocks share a `Pattern`: byte runs relative to
the block, the same for every block id. A pattern is made once; a request only picks block ids.

Blocks may be large (attention's grow to the size of a state): segments are cut to their live rows where the
bytes this saves cost more than the descriptors it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.fields import PageField
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.kv.groups import BLOCK_COST_BYTES
from rayk.kv.maps import Runs, block_strides, match_rows
from rayk.transfer.segments import live_parts, rows_of, segment_starts

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
PatternKey = tuple[int, int, int, int, int]
"""(producer rank, group, first row in the source block, in the destination block, number of rows)."""
PATTERNS_PER_READ = 64
"""Patterns kept of each producer rank and group. Blocks of unlike sizes meet in hundreds of ways, of which a
request needs those of its length."""


@dataclass(frozen=True, slots=True)
class UnitReads:
    """The units of one group that a consumer rank reads from one producer rank."""

    producer_rank: int
    group: int
    units: Mapping[str, tuple[int, ...]]
    """By field name; a field of which nothing is read is absent."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Runs that move one segment of rows, relative to block 0 of both buffers.

    Block b of run i lies `b * source_strides[i]` bytes further in the source, likewise in the destination. A
    descriptor list made of a pattern has index run * num_blocks + block.
    """

    producer_rank: int
    group: int
    source_row: int
    destination_row: int
    num_rows: int
    runs: Runs
    source_strides: Ints
    destination_strides: Ints

    @property
    def key(self) -> PatternKey:
        """Names the pattern within one consumer rank's plan."""
        return (self.producer_rank, self.group, self.source_row, self.destination_row, self.num_rows)


@dataclass(frozen=True, eq=False)
class BlockReads:
    """One pattern applied to block ids: `source_blocks[i]` goes to `destination_blocks[i]` (int64)."""

    producer_rank: int
    group: int
    pattern: Pattern
    source_blocks: Ints
    destination_blocks: Ints

    @property
    def num_bytes(self) -> int:
        """Bytes read."""
        return self.pattern.runs.num_bytes * len(self.source_blocks)

    @property
    def num_descriptors(self) -> int:
        """One per run and block."""
        return len(self.pattern.runs) * len(self.source_blocks)

    @property
    def num_coalesced(self) -> int:
        """Descriptors left when consecutive blocks of dense runs are read as one."""
        runs = self.pattern.runs
        dense = (runs.lengths == self.pattern.source_strides) & (
            runs.lengths == self.pattern.destination_strides
        )
        steps = (np.diff(self.source_blocks) == 1) & (np.diff(self.destination_blocks) == 1)
        return self.num_descriptors - int(dense.sum()) * int(steps.sum())

    def indices(self, num_source_blocks: int, num_destination_blocks: int) -> tuple[Ints32, Ints32]:
        """Descriptor indices (source, destination), int32, run-major so that dense runs can merge."""
        num_runs = len(self.pattern.runs)
        assert num_runs * max(num_source_blocks, num_destination_blocks) <= 2**31, "indices are int32"
        runs = np.arange(num_runs, dtype=np.int64)[:, None]
        source = runs * num_source_blocks + self.source_blocks[None, :]
        destination = runs * num_destination_blocks + self.destination_blocks[None, :]
        return source.astype(np.int32).reshape(-1), destination.astype(np.int32).reshape(-1)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Everything one consumer rank reads, whatever the request. `reads` is ordered by producer, group."""

    producers: tuple[RankGeometry, ...]
    consumer: RankGeometry
    reads: tuple[UnitReads, ...]

    def pattern(self, key: PatternKey) -> Pattern:
        """The pattern of this name: made on first use, and kept while it is among those used last."""
        return self._recent(key)

    @property
    def first_patterns(self) -> list[PatternKey]:
        """Those of whole segments at the start of both blocks: one per read."""
        return [
            (r.producer_rank, r.group, 0, 0, min(side.rows for side in self._sides(r))) for r in self.reads
        ]

    @cached_property
    def _recent(self) -> Callable[[PatternKey], Pattern]:
        reads = {(r.producer_rank, r.group): r for r in self.reads}

        def make(key: PatternKey) -> Pattern:
            return self._pattern(reads[key[:2]], *key[2:])

        return lru_cache(maxsize=PATTERNS_PER_READ * len(self.reads))(make)

    @property
    def producer_ranks(self) -> tuple[int, ...]:
        """Producer ranks this consumer rank reads from, ascending."""
        return tuple(sorted({r.producer_rank for r in self.reads}))

    @cached_property
    def sources(self) -> dict[tuple[int, str, int], int]:
        """(group, field, unit) -> the producer rank it is read from."""
        return {
            (r.group, field, unit): r.producer_rank
            for r in self.reads
            for field, units in r.units.items()
            for unit in units
        }

    def lower(
        self,
        num_tokens: int,
        producer_blocks: Sequence[Sequence[int]],
        consumer_blocks: Sequence[Sequence[int]],
    ) -> list[BlockReads]:
        """The reads that bring the live rows of a sequence of `num_tokens` tokens.

        Block tables are per group, manager's block ids by position in the sequence. Rows around the live ones
        may move with them: they lie in the same blocks and mean nothing to either side.
        """
        assert len(producer_blocks) == len(consumer_blocks) == len(self.consumer.groups), "a table per group"
        lowered: list[BlockReads] = []
        for read in self.reads:
            source, destination = self._sides(read)
            live = destination.group.spec.live_rows(num_tokens)
            starts = segment_starts(live, source.block_size, destination.block_size)
            source_table = np.asarray(producer_blocks[read.group], dtype=np.int64)
            destination_table = np.asarray(consumer_blocks[read.group], dtype=np.int64)
            from_blocks = source_table[starts // source.block_size]
            to_blocks = destination_table[starts // destination.block_size]
            assert np.all(from_blocks != NULL_BLOCK), "a live row lies in a null block of the producer"
            assert np.all(to_blocks != NULL_BLOCK), "a live row lies in a null block of the consumer"
            rows = rows_of(source, destination, starts)
            parts = live_parts(source, starts, rows, live)
            kinds, kind_of = np.unique(np.hstack([rows, parts]), axis=0, return_inverse=True)
            # Two kinds have one pattern where a cut does not pay.
            keys = [self._choose(read, *kind) for kind in kinds.tolist()]
            for key in dict.fromkeys(keys):
                here = np.isin(kind_of.reshape(-1), [i for i, k in enumerate(keys) if k == key])
                pattern = self.pattern(key)
                lowered.append(
                    BlockReads(read.producer_rank, read.group, pattern, from_blocks[here], to_blocks[here])
                )
        return lowered

    def _choose(
        self, read: UnitReads, source_row: int, destination_row: int, num_rows: int, first: int, stop: int
    ) -> PatternKey:
        """The pattern that moves rows [first, stop) of a segment: of those rows alone if that pays."""
        whole = (read.producer_rank, read.group, source_row, destination_row, num_rows)
        if stop - first == num_rows:
            return whole
        cut = (read.producer_rank, read.group, source_row + first, destination_row + first, stop - first)
        runs, cut_runs = self.pattern(whole).runs, self.pattern(cut).runs
        # It joins no neighbour's descriptors and takes a read of its own, even where it has no more runs.
        num_more = max(1, len(cut_runs) - len(runs))
        return cut if runs.num_bytes - cut_runs.num_bytes > num_more * BLOCK_COST_BYTES else whole

    def _sides(self, read: UnitReads) -> tuple[GroupGeometry, GroupGeometry]:
        return self.producers[read.producer_rank].groups[read.group], self.consumer.groups[read.group]

    def _pattern(self, read: UnitReads, source_row: int, destination_row: int, num_rows: int) -> Pattern:
        source, destination = self._sides(read)
        rows = {"source_row": source_row, "destination_row": destination_row, "num_rows": num_rows}
        runs = match_rows(source, destination, read.units, **rows)
        return Pattern(
            read.producer_rank,
            read.group,
            **rows,
            runs=runs,
            source_strides=block_strides(source, runs.source),
            destination_strides=block_strides(destination, runs.destination),
        )


def plan_transfer(producers: Sequence[RankGeometry], consumer: RankGeometry) -> TransferPlan:
    """Plan what one consumer rank reads from the ranks of a producer engine (in rank order)."""
    assert [p.tp_rank for p in producers] == list(range(len(producers))), "producers in rank order"
    reads: list[UnitReads] = []
    for index, group in enumerate(consumer.groups):
        sides = [p.groups[index] for p in producers]
        assert all(s.group.layers == group.group.layers for s in sides), "groups hold the same layers"
        elected: dict[int, dict[str, list[int]]] = {}
        for position, field in enumerate(group.fields):
            held = [side.fields[position].units for side in sides]
            for unit in field.units:
                rank = _elect(held, field.field, consumer, unit)
                elected.setdefault(rank, {}).setdefault(field.field.name, []).append(unit)
        reads += [
            UnitReads(rank, index, {name: tuple(units) for name, units in by_field.items()})
            for rank, by_field in elected.items()
        ]
    reads.sort(key=lambda r: (r.producer_rank, r.group))
    return TransferPlan(tuple(producers), consumer, tuple(reads))


def release_senders(
    producers: Sequence[RankGeometry], consumers: Sequence[RankGeometry]
) -> tuple[tuple[int, ...], ...]:
    """For each producer rank, the consumer ranks that must tell it when its blocks are free.

    Everybody who reads from it; a replica that nobody reads from is told by one consumer rank, else it
    would hold its blocks forever.
    """
    readers: list[list[int]] = [[] for _ in producers]
    for consumer in consumers:
        for rank in plan_transfer(producers, consumer).producer_ranks:
            readers[rank].append(consumer.tp_rank)
    return tuple(tuple(r) if r else (rank % len(consumers),) for rank, r in enumerate(readers))


def consecutive_tables(rank: RankGeometry, num_tokens: int) -> list[list[int]]:
    """Block tables of a sequence alone in an engine: ids from 1 on, nulls where no row is live."""
    tables: list[list[int]] = []
    next_block = NULL_BLOCK + 1
    for group in rank.groups:
        first = group.group.spec.live_rows(num_tokens).start // group.block_size
        count = -(-num_tokens // group.block_size) - first
        tables.append([NULL_BLOCK] * first + list(range(next_block, next_block + count)))
        next_block += count
    return tables


def _elect(held: Sequence[Sequence[int]], field: PageField, consumer: RankGeometry, unit: int) -> int:
    """The producer rank a unit is read from: readers of a unit are spread evenly over its replicas. `held`:
    the field's units by producer rank."""
    holders = [rank for rank, units in enumerate(held) if unit in units]
    assert holders, f"no producer rank holds {field.unit_name} {unit} of {field.name}"
    if len(holders) == 1:
        return holders[0]
    readers = [r for r in range(consumer.tp_size) if unit in field.shard(consumer.tp_size, r)]
    return holders[readers.index(consumer.tp_rank) * len(holders) // len(readers)]
