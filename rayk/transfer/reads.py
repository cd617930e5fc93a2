"""The data reads of one request on one consumer rank: posted, polled, cancelled, and counted in rows.

A read goes run by run into the pages, or through the staging buffer, as the cost model says or the spec
demands; it is chosen for all reads of a request before the first is posted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rayk.transfer import costs
from rayk.transfer import session as s
from rayk.transfer.agent import Transfer, TransferAgent, TransferState
from rayk.transfer.costs import Option, choose_staged
from rayk.transfer.link import ProducerLink
from rayk.transfer.plan import BlockReads
from rayk.transfer.staging import StagedRead, Staging
from rayk.types.errors import TransferError
from rayk.types.rows import TransferRow


@dataclass(eq=False)
class PostedRead:
    """A transfer that an agent carries out."""

    transfer: Transfer
    posted_ns: int
    post_ns: int


@dataclass(eq=False)
class DataReads:
    """Numbered as the session numbers them: read i brings `reads[i]`."""

    request_id: str
    reads: Sequence[BlockReads]
    link: ProducerLink
    agent: TransferAgent
    staging: Staging
    destination: torch.Tensor
    """The buffer that is read into: int8 [bytes]."""
    clock: Callable[[], int]
    refusal: str | None = None
    """Why nothing may be posted: the spec forbids the only way."""
    _options: dict[int, Option] = field(default_factory=dict)
    _is_staged: list[bool] = field(init=False)
    _uncounted: dict[int, bool] = field(default_factory=dict)
    """Reads whose costs no row tells yet -> whether their descriptors were posted as they are."""
    _direct: dict[int, PostedRead] = field(default_factory=dict)
    _staged: dict[int, tuple[StagedRead, int]] = field(default_factory=dict)
    """Staged reads, with when they began."""
    _ended_reads: list[tuple[BlockReads, int, int, int]] = field(default_factory=list)
    """Those that no row tells of yet: with what posting took, when it began, and when it ended."""
    _rows: dict[tuple[int, int], TransferRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_descriptors = sum(read.num_descriptors for read in self.reads)
        if self.staging.settings.mode == "never" and num_descriptors <= costs.MAX_DESCRIPTORS:
            self._is_staged = [False] * len(self.reads)
            return
        options = [self._option(index) for index in range(len(self.reads))]
        try:
            self._is_staged = choose_staged(self.staging.settings.mode, options)
        except TransferError as error:
            self.refusal = error.reason

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Reads that were posted and have not ended."""
        return (*self._direct, *self._staged)

    @property
    def rows(self) -> tuple[TransferRow, ...]:
        """One per (producer rank, group) that was posted, or is held. They are filled when somebody looks, so
        that no read waits for that."""
        uncounted, self._uncounted = self._uncounted, {}
        for index, is_direct in uncounted.items():
            self._count_posted(index, is_direct=is_direct)
        ended, self._ended_reads = self._ended_reads, []
        for read, post_ns, began_ns, ended_ns in ended:
            row = self._row(read)
            row.post_ns += post_ns
            row.span(began_ns, ended_ns)
        return tuple(self._rows.values())

    def note_cached(self, reads: Sequence[BlockReads]) -> None:
        """These need not be made: what they would bring is here."""
        for read in reads:
            self._row(read).held_bytes += read.num_bytes

    def post(self, index: int) -> list[s.Event]:
        """Start a read; its end, if it has ended already."""
        read = self.reads[index]
        self._uncounted[index] = False
        if self._is_staged[index]:
            producer = self.link.producers[read.producer_rank]
            staged = StagedRead(read, self.staging, producer, self.destination, self.clock)
            self._staged[index] = staged, self.clock()
            return self._ended(index, staged) if staged.begin() else []
        return self._post_direct(index, read)

    def poll(self, index: int) -> list[s.Event]:
        """Return the end of a read, if it has come; nothing of a read that is not in flight (any more)."""
        if index in self._staged:
            staged, _ = self._staged[index]
            return self._ended(index, staged) if staged.advance() else []
        posted = self._direct.get(index)
        if posted is None:
            return []
        state = self.agent.poll(posted.transfer)
        if state is TransferState.PENDING:
            return []
        del self._direct[index]
        self.agent.release(posted.transfer)
        read = self.reads[index]
        self.link.prepared.give_back(read.pattern.key)
        self._ended_reads.append((read, posted.post_ns, posted.posted_ns, self.clock()))
        if state is TransferState.DONE:
            return [s.ReadDone(index)]
        return [s.ReadEnded(index, f"read from producer rank {read.producer_rank} failed")]

    def cancel(self, index: int) -> bool:
        """Try to cancel a read; whether nothing of it is in flight: also of one that could not be posted."""
        if index in self._staged:
            is_over = self._staged[index][0].cancel()
            if is_over:
                self._end_staged(index)
            return is_over
        posted = self._direct.get(index)
        if posted is None:
            return True
        if not self.agent.release(posted.transfer):
            return False
        del self._direct[index]
        self.link.prepared.give_back(self.reads[index].pattern.key)
        return True

    def _post_direct(self, index: int, read: BlockReads) -> list[s.Event]:
        source = self.link.producers[read.producer_rank].geometry
        remote, local = read.indices(source.num_blocks, self.link.plan.consumer.num_blocks)
        began = self.clock()
        try:
            handle = self.link.prepared.take(read.pattern)
        except TransferError as error:
            return [s.ReadEnded(index, error.reason)]
        try:
            transfer = self.agent.read(handle, local, remote)
        except TransferError as error:
            self.link.prepared.give_back(read.pattern.key)
            return [s.ReadEnded(index, error.reason)]
        self._direct[index] = PostedRead(transfer, began, self.clock() - began)
        self._uncounted[index] = True
        return []

    def _ended(self, index: int, staged: StagedRead) -> list[s.Event]:
        self._end_staged(index)
        return [s.ReadDone(index) if staged.failure is None else s.ReadEnded(index, staged.failure)]

    def _end_staged(self, index: int) -> None:
        staged, began_ns = self._staged.pop(index)
        row = self._row(staged.read)
        row.repack_ns += staged.repack_ns
        self._count_descriptors(staged.read, staged.num_descriptors, staged.num_merged)
        self._ended_reads.append((staged.read, staged.post_ns, began_ns, self.clock()))

    def _option(self, index: int) -> Option:
        if index not in self._options:
            read = self.reads[index]
            self._options[index] = self.staging.option(read, self._device_of(read))
        return self._options[index]

    def _count_posted(self, index: int, *, is_direct: bool) -> None:
        read, option = self.reads[index], self._option(index)
        row = self._row(read)
        row.bytes += read.num_bytes
        row.staged |= self._is_staged[index]
        row.direct_cost_us = (row.direct_cost_us or 0.0) + option.direct_ns / 1e3
        if option.staged_ns is not None:
            row.staged_cost_us = (row.staged_cost_us or 0.0) + option.staged_ns / 1e3
        if is_direct:
            self._count_descriptors(read, read.num_descriptors, read.num_coalesced)

    def _count_descriptors(self, read: BlockReads, num_descriptors: int, num_merged: int) -> None:
        """Count what was posted: runs, or stretches where it is staged."""
        row = self._row(read)
        row.num_descriptors += num_descriptors
        row.num_descriptors_merged = (row.num_descriptors_merged or 0) + num_merged

    def _row(self, read: BlockReads) -> TransferRow:
        where = read.producer_rank, read.group
        row = self._rows.get(where)
        if row is None:
            row = self._rows[where] = TransferRow(
                cell_id="",
                repeat=0,
                request_id=self.request_id,
                producer_rank=read.producer_rank,
                consumer_rank=self.link.plan.consumer.rank,
                group=read.group,
                bytes=0,
                num_descriptors=0,
                transport=self.agent.transport_as_set,
                costs=self.staging.told(self._device_of(read)),
            )
        return row

    def _device_of(self, read: BlockReads) -> str:
        return self.link.producers[read.producer_rank].device
