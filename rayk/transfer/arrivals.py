"""What is pushed into one consumer rank's blocks: who may write, what has arrived, who must stop.

The session of a pushed request is that of one which is read; its reads are arrivals, one per producer rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer import session as s
from rayk.transfer.link import ProducerLink
from rayk.transfer.plan import BlockReads
from rayk.transfer.push_messages import (
    ArrivedMessage,
    PushMessage,
    StoppedMessage,
    Tally,
    WroteMessage,
    speaks_for,
)
from rayk.transfer.reservation_state import ReservationTable, StopRequest
from rayk.transfer.ticket import TransferTicket
from rayk.types.rows import TransferRow

Tables = Sequence[Sequence[int]]
_log = logging.getLogger(__name__)
ASK_EVERY_NS = 200_000_000
"""Producer ranks that must stop are asked again after so long: messages get lost."""


@dataclass(frozen=True, slots=True)
class _OpenPush:
    """Who may write where."""

    link: ProducerLink
    block_tables: Tables
    generations: Tables
    """Generations of these blocks since the reservation was made."""


class Arrivals:
    """The pushes into one consumer rank's blocks."""

    def __init__(self) -> None:
        self._table = ReservationTable(ASK_EVERY_NS)
        self._open: dict[str, _OpenPush] = {}
        self._never_open: list[str] = []
        """Reservations that were given up without having been opened here."""

    def __contains__(self, reservation_id: object) -> bool:
        return reservation_id in self._open

    def open(
        self, reservation_id: str, link: ProducerLink, block_tables: Tables, generations: Tables
    ) -> None:
        """Let the producer's ranks that send this rank anything write into these blocks from now on."""
        self._open[reservation_id] = _OpenPush(link, block_tables, generations)
        self._table.open(reservation_id, link.engine, link.epoch, len(link.producers))
        for rank in range(len(link.producers)):
            if rank not in link.plan.producer_ranks:
                self._table.on_stopped(StoppedMessage(reservation_id, rank, "it sends nothing here"))

    def take(self, message: PushMessage, peer: str) -> None:
        """Note what a producer rank says. What comes late, twice, of nobody, or from an agent (`peer`) that
        is not that rank's changes nothing."""
        if not isinstance(message, WroteMessage | ArrivedMessage | StoppedMessage):
            return
        found, rank = self._open.get(message.reservation_id), message.producer_rank
        if found is None or rank >= len(found.link.producers):
            return
        link = found.link
        if not speaks_for(peer, link.producers[rank].agent_name):
            _log.warning("%s speaks for producer rank %d of %s: %r", peer, rank, link.engine, message)
        elif isinstance(message, StoppedMessage):
            self._table.on_stopped(message)
        else:
            self._table.on_progress(message)

    def stop(self, reservation_id: str, now_ns: int, attempt: int | None = None) -> None:
        """The blocks are wanted back; `attempt`: the ticket's, where there is one."""
        if reservation_id in self._open:
            self._table.stop(reservation_id, now_ns, attempt)
        else:
            self._never_open.append(reservation_id)

    def on_engine_gone(self, engine: str, epoch: int) -> None:
        """A life of a producer engine is certainly over."""
        self._table.on_engine_gone(engine, epoch)

    def stop_requests(self, now_ns: int) -> list[tuple[ProducerLink, StopRequest]]:
        """Whom to ask to stop, now."""
        return [(self._open[request.reservation_id].link, request) for request in self._table.tick(now_ns)]

    def take_clear(self) -> list[str]:
        """List reservations that were stopped and into whose blocks nobody writes any more, each once."""
        never_open, self._never_open = self._never_open, []
        clear = self._table.take_clear()
        for reservation_id in clear:
            del self._open[reservation_id]
        return clear + never_open

    def has_arrived(self, reservation_id: str, producer_rank: int, attempt: int) -> bool:
        """Tell whether all that a producer rank sends is here."""
        return self._table.has_arrived(reservation_id, producer_rank, attempt)

    def why_stopped(self, reservation_id: str, producer_rank: int) -> str | None:
        """Say why a producer rank sends no more; None: it may."""
        if reservation_id not in self._open:
            return "its blocks were given up"
        return self._table.stopped(reservation_id).get(producer_rank)

    def missing(self, reservation_id: str, attempt: int) -> dict[int, str | None]:
        found = self._open.get(reservation_id)
        ranks = found.link.plan.producer_ranks if found is not None else ()
        left = [rank for rank in ranks if not self.has_arrived(reservation_id, rank, attempt)]
        return {rank: self.why_stopped(reservation_id, rank) for rank in left}

    def lost_block(self, reservation_id: str, generations: Callable[[Tables], Tables]) -> int | None:
        """Return a block that was handed out again since it was reserved. `generations`: what they are
        now."""
        found = self._open[reservation_id]
        tables = found.block_tables
        for blocks, before, now in zip(tables, found.generations, generations(tables), strict=True):
            for block, was, is_now in zip(blocks, before, now, strict=True):
                if block != NULL_BLOCK and was != is_now:
                    return block
        return None

    def arrival(self, reservation_id: str, producer_rank: int) -> ArrivedMessage | None:
        """Return what a producer rank said when all of it was here, if it is."""
        return self._table.arrival(reservation_id, producer_rank)


@dataclass(eq=False)
class ArrivalReads:
    """The arrivals of one request, as its session's reads: read i is what `producer_ranks[i]` sends."""

    ticket: TransferTicket
    arrivals: Arrivals
    link: ProducerLink
    transport: str
    lost_block: Callable[[], int | None]
    """A block of ours that was handed out again since it was reserved, if there is one."""
    clock: Callable[[], int]
    refusal: str | None = None
    """Nothing may be waited for; never."""
    _left: list[int] = field(default_factory=list)
    _rows: list[TransferRow] = field(default_factory=list)
    _held_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(producer rank, group) -> what need not arrive."""
    _is_stopped: bool = False

    @property
    def producer_ranks(self) -> Sequence[int]:
        """Those that send this rank anything."""
        return self.link.plan.producer_ranks

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Arrivals that are waited for."""
        return tuple(self._left)

    @property
    def rows(self) -> tuple[TransferRow, ...]:
        """One per producer rank that arrived, and group."""
        return tuple(self._rows)

    def note_cached(self, reads: Sequence[BlockReads]) -> None:
        """These are here already, and are not pushed."""
        for read in reads:
            self._held_bytes[read.producer_rank, read.group] += read.num_bytes

    def post(self, index: int) -> list[s.Event]:
        """Wait for an arrival."""
        self._left.append(index)
        return []

    def poll(self, index: int) -> list[s.Event]:
        """Return an arrival, or why none will come."""
        if index not in self._left:
            return []
        rank, reservation_id = self.producer_ranks[index], self._reservation_id
        if self.arrivals.has_arrived(reservation_id, rank, self.ticket.attempt):
            self._left.remove(index)
            arrival = self.arrivals.arrival(reservation_id, rank)
            assert arrival is not None, "it has arrived"
            told = {tally.group: tally for tally in arrival.tally}
            groups = sorted({*told, *(group for r, group in self._held_bytes if r == rank)})
            tallies = [told.get(group) or Tally(group, *[0] * 8) for group in groups]
            self._rows += [self._row(rank, tally, arrival.costs) for tally in tallies]
            lost = self.lost_block()
            if lost is None:
                return [s.ReadDone(index)]
            return [s.ReadEnded(index, f"block {lost} was handed out again while it was being written to")]
        why = self.arrivals.why_stopped(reservation_id, rank)
        if why is None:
            return []
        self._left.remove(index)
        return [s.ReadEnded(index, f"producer rank {rank} stopped: {why or 'no reason was given'}")]

    def cancel(self, index: int) -> bool:
        """Ask for an end of it; whether nothing of it is under way."""
        self.stop()
        return index not in self._left

    def stop(self) -> None:
        """The transfer is over: nobody may write any more."""
        if not self._is_stopped:
            self._is_stopped = True
            self.arrivals.stop(self._reservation_id, self.clock(), self.ticket.attempt)

    @property
    def _reservation_id(self) -> str:
        assert self.ticket.reservation_id is not None
        return self.ticket.reservation_id

    def _row(self, rank: int, tally: Tally, costs: str) -> TransferRow:
        return TransferRow(
            cell_id="",
            repeat=0,
            request_id=self.ticket.request_id,
            producer_rank=rank,
            consumer_rank=self.link.plan.consumer.rank,
            group=tally.group,
            bytes=tally.num_bytes,
            held_bytes=self._held_bytes[rank, tally.group],
            num_descriptors=tally.num_descriptors,
            num_descriptors_merged=tally.num_merged,
            mode="push",
            post_ns=tally.post_ns,
            transfer_ns=tally.transfer_ns,
            transport=self.transport,
            costs=costs,
            num_layers_per_write=tally.layers_per_write,
            num_writes=tally.num_writes,
            num_early_writes=tally.num_early_writes,
        )
