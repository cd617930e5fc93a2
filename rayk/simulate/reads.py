"""Plan the reads of simulated hand-overs: the planner of real ranks says what each pair of ranks moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import plan_engine
from rayk.specs.experiment import TransferSpec
from rayk.transfer.costs import AS_CODED, Option, choose_staged, transfer_costs
from rayk.transfer.extents import Extents, make_extents
from rayk.transfer.options import chunk_blocks, num_merged, read_option
from rayk.transfer.plan import BlockReads, Pattern, TransferPlan, consecutive_tables, plan_transfer
from rayk.types.config import EngineConfig
from rayk.types.rows import TransferRow

TRANSPORT = "nixl/UCX"
LENGTHS_KEPT = 4096
"""Numbers of tokens whose bytes are remembered."""

Tables = Sequence[Sequence[int]]


class ReadPlans:
    """What the ranks of a decode engine read from those of a prefill engine, of one kind each."""

    def __init__(
        self, prefill: EngineConfig, decode: EngineConfig, model: DecoderConfig, transfer: TransferSpec
    ) -> None:
        """Layouts are those of engines whose backends read any, as `rayk explain` has them."""
        producer, consumer = plan_engine(prefill, model), plan_engine(decode, model)
        self.lenders = producer.groups
        self._producers = producer.ranks
        self.lent_bytes = lru_cache(maxsize=LENGTHS_KEPT)(self._lent_bytes)
        """Tokens of a request -> the bytes that readers take from the producer rank which has most."""
        self._plans = [plan_transfer(producer.ranks, rank) for rank in consumer.ranks]
        self._staging, self._staging_bytes = transfer.staging, transfer.staging_mib << 20
        self._costs = transfer_costs(TRANSPORT, decode.device)
        self._extents: WeakKeyDictionary[Pattern, tuple[Extents, ...]] = WeakKeyDictionary()

    def rows(
        self, request_id: str, num_tokens: int, theirs: Tables, ours: Tables, *, first_row: int = 0
    ) -> list[list[TransferRow]]:
        """Return, per consumer rank, the rows of a request's reads into these blocks, without times. What
        lies before `first_row` is held. Raises TransferError where the spec forbids the only way."""
        return [
            self._rank_rows(request_id, plan, num_tokens, (theirs, ours), first_row) for plan in self._plans
        ]

    def _rank_rows(
        self,
        request_id: str,
        plan: TransferPlan,
        num_tokens: int,
        tables: tuple[Tables, Tables],
        first_row: int,
    ) -> list[TransferRow]:
        rows: dict[tuple[int, int], TransferRow] = {}

        def row_of(read: BlockReads) -> TransferRow:
            where = read.producer_rank, read.group
            return rows.setdefault(where, _row(request_id, plan.consumer.rank, read))

        if first_row:
            for read in plan.lower(num_tokens, *tables, rows=range(first_row)):
                row_of(read).held_bytes += read.num_bytes
        wanted = range(first_row, num_tokens) if first_row else None
        reads = plan.lower(num_tokens, *tables, rows=wanted)
        options = [
            read_option(read, self._parts(read.pattern), self._costs, self._staging_bytes) for read in reads
        ]
        chosen = choose_staged(self._staging, options)
        for read, option, is_staged in zip(reads, options, chosen, strict=True):
            self._count(row_of(read), read, option, is_staged=is_staged)
        return list(rows.values())

    def _parts(self, pattern: Pattern) -> tuple[Extents, ...]:
        """Say how a pattern is staged; nothing where it cannot be."""
        found = self._extents.get(pattern)
        if found is None:
            made = make_extents(pattern, self._costs.gap_bytes, self._staging_bytes)
            found = self._extents[pattern] = made or ()
        return found

    def _count(self, row: TransferRow, read: BlockReads, option: Option, *, is_staged: bool) -> None:
        """Add a read to its row, as transfer.reads does."""
        row.bytes += read.num_bytes
        row.staged |= is_staged
        row.direct_cost_us = (row.direct_cost_us or 0.0) + option.direct_ns / 1e3
        if option.staged_ns is not None:
            row.staged_cost_us = (row.staged_cost_us or 0.0) + option.staged_ns / 1e3
        merged = self._num_staged(read) if is_staged else read.num_coalesced
        row.num_descriptors += option.num_staged if is_staged else read.num_descriptors
        row.num_descriptors_merged = (row.num_descriptors_merged or 0) + merged

    def _num_staged(self, read: BlockReads) -> int:
        """Count the descriptors of a staged read that are left when neighbours are joined: chunk by chunk."""
        num, blocks = 0, read.source_blocks
        for part in self._parts(read.pattern):
            step = chunk_blocks(part, self._staging_bytes)
            num += sum(num_merged(part, blocks[i : i + step]) for i in range(0, len(blocks), step))
        return num

    def _lent_bytes(self, num_tokens: int) -> int:
        theirs = consecutive_tables(self._producers[0], num_tokens)
        lent: Counter[int] = Counter()
        for plan in self._plans:
            ours = consecutive_tables(plan.consumer, num_tokens)
            for read in plan.lower(num_tokens, theirs, ours):
                lent[read.producer_rank] += read.num_bytes
        return max(lent.values(), default=0)


def _row(request_id: str, consumer_rank: int, read: BlockReads) -> TransferRow:
    return TransferRow(
        cell_id="",
        repeat=0,
        request_id=request_id,
        producer_rank=read.producer_rank,
        consumer_rank=consumer_rank,
        group=read.group,
        bytes=0,
        num_descriptors=0,
        transport=TRANSPORT,
        costs=AS_CODED,
    )
