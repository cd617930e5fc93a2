"""Which bytes each consumer rank reads from which producer rank. Pure; free of torch.

A plan goes through canonical coordinates: of every layer and field, every unit a consumer rank holds has one
elected source rank that holds it too, and rows are cut wherever a block of either side ends, so that a
segment lies in one block on both sides. Layers are matched by number: which of them share a group, and how
long its blocks are, is each engine's own affair. Segments that lie alike in both blocks share a `Pattern`:
byte runs relative to the block, the same for every block id. A pattern is made once, and which patterns a
request of so many tokens takes is remembered: it only picks block ids.

Only rows that a layer can still see are moved, whatever its group keeps. Blocks may be large (attention's
grow to the size of a state): segments are cut to their live rows where the bytes this saves cost more than
the descriptors it adds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.kv.groups import BLOCK_COST_BYTES, REFERENCE_BLOCK_SIZE
from rayk.kv.maps import Runs, block_strides, match_rows
from rayk.kv.riders import of_groups
from rayk.kv.specs import KVCacheSpec
from rayk.transfer.drafts import left_out
from rayk.transfer.election import elect
from rayk.transfer.segments import CopySegments, Kind, shared_segments
from rayk.transfer.tables import checked_tables, real_blocks
from rayk.transfer.token_classes import TokenClasses
from rayk.types.errors import HandshakeMismatch

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
SHAPES_KEPT = 128
"""Requests that move the same rows as one of the last so many, such as all that end among the same 16 tokens
where every token is kept, are only filled with block ids."""
PATTERNS_PER_READ = 64
"""Patterns kept of each producer rank and group. Blocks of unlike sizes meet in hundreds of ways, of which a
request needs those of its length."""


class PatternKey(NamedTuple):
    """Names a pattern within one consumer rank's plan."""

    producer_rank: int
    source_group: int
    group: int
    """The consumer's."""
    layers: tuple[int, ...]
    source_row: int
    """First row in the source block."""
    destination_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class UnitReads:
    """The units of some layers that a consumer rank reads from one producer rank: of those that share a group
    on either side."""

    producer_rank: int
    source_group: int
    group: int
    """The consumer's."""
    layers: tuple[int, ...]
    """Layers in the order of the consumer's group."""
    units: Mapping[str, tuple[int, ...]]
    """Units by field name; a field of which nothing is read is absent."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Runs that move one segment of rows of some layers, relative to block 0 of both buffers.

    Block b of run i lies `b * source_strides[i]` bytes further in the source, likewise in the destination. A
    descriptor list made of a pattern has index run * num_blocks + block.
    """

    key: PatternKey
    runs: Runs
    source_strides: Ints
    destination_strides: Ints

    @property
    def producer_rank(self) -> int:
        """Whom it is read from."""
        return self.key.producer_rank

    @property
    def source_row(self) -> int:
        """First row in the source block."""
        return self.key.source_row

    @property
    def destination_row(self) -> int:
        """First row in the destination block."""
        return self.key.destination_row

    @property
    def num_rows(self) -> int:
        """Rows of each unit and layer."""
        return self.key.num_rows

    @cached_property
    def num_bytes(self) -> int:
        return self.runs.num_bytes

    @cached_property
    def num_dense(self) -> int:
        """Runs that fill their blocks on both sides: those of consecutive blocks are one."""
        lengths = self.runs.lengths
        return int(((lengths == self.source_strides) & (lengths == self.destination_strides)).sum())


@dataclass(frozen=True, eq=False)
class BlockReads:
    """One pattern applied to block ids: `source_blocks[i]` goes to `destination_blocks[i]` (int64)."""

    pattern: Pattern
    source_blocks: Ints
    destination_blocks: Ints

    @property
    def producer_rank(self) -> int:
        """Whom it is read from."""
        return self.pattern.key.producer_rank

    @property
    def source_group(self) -> int:
        """The producer's group, whose block table `source_blocks` are of."""
        return self.pattern.key.source_group

    @property
    def group(self) -> int:
        """The consumer's group, whose block table `destination_blocks` are of."""
        return self.pattern.key.group

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose rows it brings."""
        return self.pattern.key.layers

    @property
    def num_bytes(self) -> int:
        """Bytes read."""
        return self.pattern.num_bytes * len(self.source_blocks)

    @property
    def num_descriptors(self) -> int:
        """One per run and block."""
        return len(self.pattern.runs) * len(self.source_blocks)

    @cached_property
    def num_coalesced(self) -> int:
        """Descriptors left when consecutive blocks of dense runs are read as one."""
        num_dense = self.pattern.num_dense
        return self.num_descriptors - (num_dense * self._num_steps() if num_dense else 0)

    def _num_steps(self) -> int:
        """Count the blocks that follow their neighbour on both sides."""
        here, there = self.source_blocks, self.destination_blocks
        return int(np.count_nonzero((here[1:] - here[:-1] == 1) & (there[1:] - there[:-1] == 1)))

    def offsets(self) -> tuple[Ints, Ints]:
        """Tell where each descriptor lies in both buffers (source, destination), int64, run-major as
        `indices`."""
        p, runs = self.pattern, self.pattern.runs
        source = runs.source[:, None] + self.source_blocks * p.source_strides[:, None]
        destination = runs.destination[:, None] + self.destination_blocks * p.destination_strides[:, None]
        return source.reshape(-1), destination.reshape(-1)

    def indices(self, num_source_blocks: int, num_destination_blocks: int) -> tuple[Ints32, Ints32]:
        """Descriptor indices (source, destination), int32, run-major so that dense runs can merge."""
        return (
            self._indices(num_source_blocks, self.source_blocks),
            self._indices(num_destination_blocks, self.destination_blocks),
        )

    def _indices(self, num_blocks: int, blocks: Ints) -> Ints32:
        num_descriptors = len(self.pattern.runs) * num_blocks
        assert num_descriptors <= 2**31, "indices are int32"
        ids = blocks.astype(np.int32)
        if num_descriptors == num_blocks:
            return ids
        first = np.arange(0, num_descriptors, num_blocks, dtype=np.int32)
        return (first[:, None] + ids).reshape(-1)


@dataclass(frozen=True, eq=False)
class _Cut:
    """Consecutive segments of some layers, whichever rank they are read from."""

    source_group: int
    group: int
    layers: tuple[int, ...]
    here: slice | Ints
    there: slice | Ints
    """Where their blocks stand in the tables of both sides."""
    num_segments: int
    kinds: list[Kind]
    """Kinds of the first segment, of a period of those behind it, and of the last one; one where all are
    alike."""


@dataclass(frozen=True, eq=False)
class _Shape:
    """Reads to be filled with the block ids of a request."""

    cuts: tuple[_Cut, ...]
    parts: tuple[tuple[int, Pattern, Bools | None], ...]
    """Reads in order: the index of a cut, the pattern that some of its segments have, and which these are;
    None stands for all."""


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Everything one consumer rank reads, whatever the request. `reads` is ordered by producer, group."""

    producers: tuple[RankGeometry, ...]
    consumer: RankGeometry
    reads: tuple[UnitReads, ...]
    left_out: tuple[str, ...] = ()
    """Draft layers of either side that do not move, and why."""

    def pattern(self, key: PatternKey) -> Pattern:
        """Return the pattern of this name: made on first use, and kept while it is among those used last."""
        return self._recent(key)

    @property
    def first_patterns(self) -> list[PatternKey]:
        """Those of whole segments at the start of both blocks: one per read, but where these move nothing."""
        keys = [_key(r, 0, 0, min(side.block_rows for side in self._sides(r))) for r in self.reads]
        return [key for key in keys if len(self.pattern(key).runs)]

    @cached_property
    def _recent(self) -> Callable[[PatternKey], Pattern]:
        # Units do not depend on the layers: those of a group are held alike.
        reads = {(r.producer_rank, r.source_group, r.group): r for r in self.reads}

        def make(key: PatternKey) -> Pattern:
            read = reads[key[:3]]
            return self._pattern(replace(read, layers=key.layers), *key[4:])

        # Layers may be asked for one by one.
        return lru_cache(maxsize=PATTERNS_PER_READ * sum(len(r.layers) for r in self.reads))(make)

    @property
    def producer_ranks(self) -> tuple[int, ...]:
        """Producer ranks this consumer rank reads from, ascending."""
        return tuple(sorted({r.producer_rank for r in self.reads}))

    @cached_property
    def late_layers(self) -> frozenset[int]:
        """Layers of which rows that live when they are computed may not live to the end of a prompt: states,
        and what has a window or chunks."""
        seen = ((n, self.consumer.groups[r.group].group.seen_by(n)) for r in self.reads for n in r.layers)
        return frozenset(layer for layer, spec in seen if spec.live_step)

    @cached_property
    def sources(self) -> Callable[[TokenClasses], Mapping[tuple[int, str, int, int], int]]:
        """Token classes -> (layer, field, unit, token class) -> the producer rank it is read from."""

        def find(classes: TokenClasses) -> Mapping[tuple[int, str, int, int], int]:
            return {
                (layer, field, unit, token_class): r.producer_rank
                for r in self.reads
                for token_class in self._classes_read(r, classes)
                for layer in r.layers
                for field, units in r.units.items()
                for unit in units
            }

        return lru_cache(maxsize=1)(find)

    def _classes_read(self, read: UnitReads, classes: TokenClasses) -> Collection[int]:
        """Return the token classes that both sides of a read hold; 0 of states."""
        sides = self._sides(read)
        if not sides[0].group.spec.has_token_rows:
            return (0,)
        theirs, ours = (classes.held(side.tokens) for side in sides)
        return sorted({*theirs} & {*ours})

    def lower(
        self,
        num_tokens: int,
        producer_blocks: Sequence[Sequence[int]],
        consumer_blocks: Sequence[Sequence[int]],
        *,
        layers: Collection[int] | None = None,
        rows: range | None = None,
    ) -> list[BlockReads]:
        """Return the reads that bring the live rows of a sequence of `num_tokens` tokens.

        Block tables are per group of either engine, manager's block ids by position in the sequence. Rows
        around the live ones may move with them: they lie in the same blocks and mean nothing to either side.

        `layers`: of these only. `rows`: token positions; of the segments those only whose last live row is
        among them, so that disjoint ranges make disjoint reads, and in order a segment moves when all of it
        is there. Tables may end where these segments do.

        The tables of one side are a peer's: TransferError where a table is missing or too short, holds no
        block ids, or has a null block for a live row, of either side. Whether the blocks are in a pool is not
        looked at: costs are told of tables that are in none.
        """
        sources = checked_tables("producer", producer_blocks, self.producers[0])
        destinations = checked_tables("consumer", consumer_blocks, self.consumer)
        # `rows` may end within a grain.
        alike = num_tokens if rows is not None else -(-num_tokens // self._grain) * self._grain
        shape = self._shapes(alike, None if layers is None else frozenset(layers), rows)
        blocks = [
            (
                real_blocks("producer", sources[cut.source_group], cut.here, cut.num_segments),
                real_blocks("consumer", destinations[cut.group], cut.there, cut.num_segments),
            )
            for cut in shape.cuts
        ]
        lowered = []
        for index, pattern, chosen in shape.parts:
            here, there = blocks[index]
            is_whole = chosen is None
            lowered.append(
                BlockReads(pattern, here if is_whole else here[chosen], there if is_whole else there[chosen])
            )
        return lowered

    @cached_property
    def _grain(self) -> int:
        """Return a number of tokens: sequences that end among the same so many move the same rows, since all
        cuts are at multiples of it. It is 1 where rows die, whose first ones lie anywhere."""
        if self.late_layers:
            return 1
        sizes = (side.block_size for read in self.reads for side in self._sides(read))
        return math.gcd(REFERENCE_BLOCK_SIZE, *sizes)

    @cached_property
    def _shapes(self) -> Callable[[int, frozenset[int] | None, range | None], _Shape]:
        """(tokens, layers, rows), see `lower` -> what it fills."""
        return lru_cache(maxsize=SHAPES_KEPT)(self._shape)

    def _shape(self, num_tokens: int, layers: frozenset[int] | None, rows: range | None) -> _Shape:
        cuts: list[_Cut] = []
        parts: list[tuple[int, Pattern, Bools | None]] = []
        known: dict[tuple[int, int, tuple[int, ...]], range] = {}
        """Indices of the cuts of layers in two groups."""
        for read in self.reads:
            kept = read.layers if layers is None else tuple(n for n in read.layers if n in layers)
            if not kept:
                continue
            # Blocks are as long on all ranks of an engine.
            where = read.source_group, read.group, kept
            if where not in known:
                before = len(cuts)
                cuts += self._cuts(where, num_tokens, rows)
                known[where] = range(before, len(cuts))
            for index in known[where]:
                cut = cuts[index]
                part = read if cut.layers == read.layers else replace(read, layers=cut.layers)
                parts += [
                    (index, pattern, chosen)
                    for pattern, chosen in self._patterns(part, cut)
                    if len(pattern.runs)  # blocks may meet in no token of both ranks
                ]
        return _Shape(tuple(cuts), tuple(parts))

    @cached_property
    def _seen(self) -> Callable[[int, tuple[int, ...]], list[tuple[KVCacheSpec, tuple[int, ...]]]]:
        """(group, layers) -> the specs by which consecutive ones of these layers see rows."""

        def split(group: int, layers: tuple[int, ...]) -> list[tuple[KVCacheSpec, tuple[int, ...]]]:
            seen = self.consumer.groups[group].group.seen_by
            return [(spec, tuple(seeing)) for spec, seeing in itertools.groupby(layers, seen)]

        return lru_cache(maxsize=PATTERNS_PER_READ * max(1, len(self.reads)))(split)

    @cached_property
    def _segments(self) -> dict[tuple[int, int], CopySegments]:
        return {(r.source_group, r.group): CopySegments(*self._sides(r)) for r in self.reads}

    def _cuts(
        self,
        where: tuple[int, int, tuple[int, ...]],
        num_tokens: int,
        among: range | None,
    ) -> Iterator[_Cut]:
        """Cut the layers of two groups together; apart those that see fewer rows than others."""
        source_group, group, layers = where
        segments = self._segments[source_group, group]
        layers_of: dict[range, list[int]] = {}
        for spec, seeing in self._seen(group, layers):
            live = spec.live_rows(num_tokens)
            layers_of.setdefault(live, []).extend(seeing)
        for lives, found in shared_segments({live: segments.holding(live) for live in layers_of}):
            together = {layer for live in lives for layer in layers_of[live]}
            live = range(min(n.start for n in lives), max(n.stop for n in lives))
            chosen = found if among is None else segments.ending_in(among, found, live)
            if not chosen:
                continue
            starts = segments.starts(chosen)
            # All but the first and the last are live as a whole.
            each = starts[0], *starts[1:-1][: segments.per_period], starts[-1]
            kinds = [segments.kind(int(start), live) for start in each]
            if kinds.count(kinds[0]) == len(kinds):
                kinds = kinds[:1]
            moved = layers if len(layers_of) == 1 else tuple(n for n in layers if n in together)
            yield _Cut(source_group, group, moved, *segments.blocks(starts), len(starts), kinds)

    def _patterns(self, read: UnitReads, cut: _Cut) -> Iterator[tuple[Pattern, Bools | None]]:
        """Yield the patterns that bring a cut, and which of its segments each brings; None: all."""
        keys = [self._choose(read, *kind) for kind in cut.kinds]
        # Two kinds have one pattern where a cut does not pay.
        if keys.count(keys[0]) == len(keys):
            yield self.pattern(keys[0]), None
            return
        patterns = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        first, *between, last = (patterns[key] for key in keys)
        pattern_of = np.empty(cut.num_segments, dtype=np.int64)
        pattern_of[0], pattern_of[-1] = first, last
        pattern_of[1:-1] = np.resize(between, max(0, len(pattern_of) - 2))
        for key, index in patterns.items():
            yield self.pattern(key), pattern_of == index

    def _choose(
        self, read: UnitReads, source_row: int, destination_row: int, num_rows: int, first: int, stop: int
    ) -> PatternKey:
        """Return the pattern that moves rows [first, stop) of a segment: of those rows alone if that pays."""
        whole = _key(read, source_row, destination_row, num_rows)
        if stop - first == num_rows:
            return whole
        cut = _key(read, source_row + first, destination_row + first, stop - first)
        of_all, of_part = self.pattern(whole), self.pattern(cut)
        # It joins no neighbour's descriptors and takes a read of its own, even where it has no more runs.
        num_more = max(1, len(of_part.runs) - len(of_all.runs))
        saved = of_all.num_bytes - of_part.num_bytes
        return cut if saved > num_more * BLOCK_COST_BYTES or not len(of_part.runs) else whole

    def _sides(self, read: UnitReads) -> tuple[GroupGeometry, GroupGeometry]:
        return self.producers[read.producer_rank].groups[read.source_group], self.consumer.groups[read.group]

    def _pattern(self, read: UnitReads, source_row: int, destination_row: int, num_rows: int) -> Pattern:
        source, destination = self._sides(read)
        rows = {"source_row": source_row, "destination_row": destination_row, "num_rows": num_rows}
        runs = match_rows(source, destination, read.units, layers=read.layers, **rows)
        return Pattern(
            _key(read, **rows),
            runs=runs,
            source_strides=block_strides(source, runs.source),
            destination_strides=block_strides(destination, runs.destination),
        )


def num_turns(producers: Sequence[RankGeometry]) -> int:
    """Turns until every replica of a unit was read once by each of its readers: the most replicas of any."""
    replicas: Counter[object] = Counter()
    for rank in producers:
        for index, group in enumerate(rank.groups):
            for position, side in enumerate(group.fields):
                of = index, position, group.layers, group.tokens
                replicas.update((of, unit) for unit in side.units if group.layers)
    return max(replicas.values(), default=1)


def plan_transfer(producers: Sequence[RankGeometry], consumer: RankGeometry, turn: int = 0) -> TransferPlan:
    """Plan what one consumer rank reads from the ranks of a producer engine (in rank order). With each
    `turn`, which counts from 0 on and on, the next replica is read: see `num_turns`."""
    assert [p.rank for p in producers] == list(range(len(producers))), "producers in rank order"
    homes = {key: index for index, g in enumerate(producers[0].groups) for key in g.group.keys}
    out = left_out(producers[0], consumer)
    reads: list[UnitReads] = []
    for index, group in enumerate(consumer.groups):
        together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        """(source group, producer ranks of a stage) -> layers that they have."""
        for layer, part in (key for key in group.keys if key not in out):
            home = homes.get((layer, part))
            stage = () if home is None else tuple(p.rank for p in producers if layer in p.groups[home].layers)
            if home is None or not stage:
                raise HandshakeMismatch(((f"layer {layer}.{part}.cache", "absent", "kept"),))
            together.setdefault((home, stage), []).append(layer)
        for (source_group, stage), layers in together.items():
            sides = {rank: producers[rank].groups[source_group] for rank in stage}
            elected = elect(sides, group, consumer, turn)
            reads += [
                UnitReads(rank, source_group, index, tuple(layers), units) for rank, units in elected.items()
            ]
    reads.sort(key=lambda r: (r.producer_rank, r.group, r.source_group))
    return TransferPlan(tuple(producers), consumer, tuple(reads), tuple(out.values()))


def plan_pushes(
    producer: RankGeometry,
    producers: Sequence[RankGeometry],
    consumers: Sequence[RankGeometry],
    turn: int = 0,
) -> dict[int, TransferPlan]:
    """Return what one producer rank writes, by consumer rank: of each consumer rank's plan, what it reads
    from it.

    `lower` gives the same BlockReads as the consumer's, to be written instead of read. Consumer ranks that
    get nothing from this one are absent.
    """
    pushes: dict[int, TransferPlan] = {}
    for consumer in consumers:
        plan = plan_transfer(producers, consumer, turn)
        mine = tuple(r for r in plan.reads if r.producer_rank == producer.rank)
        if mine:
            pushes[consumer.rank] = replace(plan, reads=mine)
    return pushes


def release_senders(
    producers: Sequence[RankGeometry], consumers: Sequence[RankGeometry], turn: int = 0
) -> tuple[tuple[int, ...], ...]:
    """For each producer rank, the consumer ranks that must tell it when the blocks that they read in this
    turn are free.

    Everybody who reads from it; a replica that nobody reads from is told by one consumer rank, else it
    would hold its blocks forever.
    """
    readers: list[list[int]] = [[] for _ in producers]
    for consumer in consumers:
        for rank in plan_transfer(producers, consumer, turn).producer_ranks:
            readers[rank].append(consumer.rank)
    return tuple(tuple(r) if r else (rank % len(consumers),) for rank, r in enumerate(readers))


def consecutive_tables(rank: RankGeometry, num_tokens: int) -> list[list[int]]:
    """Block tables of a sequence alone in an engine: ids from 1 on, nulls where no row is live."""
    tables: list[list[int]] = []
    next_block = NULL_BLOCK + 1
    for group in (g for g in rank.groups if g.group.rides is None):
        first = group.group.spec.live_rows(num_tokens).start // group.block_size
        count = -(-num_tokens // group.block_size) - first
        tables.append([NULL_BLOCK] * first + list(range(next_block, next_block + count)))
        next_block += count
    return list(of_groups([g.group for g in rank.groups], tables))


def _key(read: UnitReads, source_row: int, destination_row: int, num_rows: int) -> PatternKey:
    where = (read.producer_rank, read.source_group, read.group, read.layers)
    return PatternKey(*where, source_row, destination_row, num_rows)
