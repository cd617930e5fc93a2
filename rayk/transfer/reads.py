"""The data reads of one request on one consumer rank: posted, polled, cancelled, and counted in rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rayk.transfer import session as s
from rayk.transfer.agent import Transfer, TransferAgent, TransferState
from rayk.transfer.link import ProducerLink
from rayk.transfer.plan import BlockReads
from rayk.types.errors import TransferError
from rayk.types.rows import TransferRow


@dataclass(eq=False)
class InFlight:
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
    clock: Callable[[], int]
    _flights: dict[int, InFlight] = field(default_factory=dict)
    _rows: dict[tuple[int, int], TransferRow] = field(default_factory=dict)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Reads that were posted and have not ended."""
        return tuple(self._flights)

    @property
    def rows(self) -> tuple[TransferRow, ...]:
        """One per (producer rank, group) that was posted."""
        return tuple(self._rows.values())

    def post(self, index: int) -> list[s.Event]:
        """Start a read; its end, if it could not be started."""
        read = self.reads[index]
        row = self._row(read)
        row.bytes += read.num_bytes
        row.num_descriptors += read.num_descriptors
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
        self._flights[index] = InFlight(transfer, began, self.clock() - began)
        return []

    def poll(self, index: int) -> list[s.Event]:
        """The end of a read, if it has come; nothing of a read that is not in flight (any more)."""
        flight = self._flights.get(index)
        if flight is None:
            return []
        state = self.agent.poll(flight.transfer)
        if state is TransferState.PENDING:
            return []
        del self._flights[index]
        self.agent.release(flight.transfer)
        read = self.reads[index]
        self.link.prepared.give_back(read.pattern.key)
        row = self._row(read)
        row.post_ns += flight.post_ns
        row.transfer_ns = max(row.transfer_ns, self.clock() - flight.posted_ns)
        if state is TransferState.DONE:
            return [s.ReadDone(index)]
        return [s.ReadEnded(index, f"read from producer rank {read.producer_rank} failed")]

    def cancel(self, index: int) -> bool:
        """Try to cancel a read; whether nothing of it is in flight: also of one that could not be posted."""
        flight = self._flights.get(index)
        if flight is None:
            return True
        if not self.agent.release(flight.transfer):
            return False
        del self._flights[index]
        self.link.prepared.give_back(self.reads[index].pattern.key)
        return True

    def _row(self, read: BlockReads) -> TransferRow:
        return self._rows.setdefault(
            (read.producer_rank, read.group),
            TransferRow(
                cell_id="",
                repeat=0,
                request_id=self.request_id,
                producer_rank=read.producer_rank,
                consumer_rank=self.link.plan.consumer.tp_rank,
                group=read.group,
                bytes=0,
                num_descriptors=0,
                transport=self.agent.transport,
            ),
        )
