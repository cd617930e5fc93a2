"""Who may push into one consumer rank's memory: reservations, their wire cache blocks, and what arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from rayk.transfer.agent import TransferAgent
from rayk.transfer.arrivals import ArrivalReads, Arrivals
from rayk.transfer.link import ProducerLink
from rayk.transfer.push_messages import StopMessage
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.wire import WireCache
from rayk.transfer.wire_queue import BlockTables, Queued
from rayk.types.errors import RaykError, TransferError

Generations = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """One consumer rank's answer to who wants to push."""

    reservation_id: str
    generations: Generations = ()
    """Generations of the rank's own blocks since they were reserved."""
    wire_tables: tuple[tuple[int, ...], ...] = ()
    """Where to write instead, in the rank's wire cache; empty: into those blocks."""
    error: RaykError | None = None
    """Nobody may write."""


@dataclass(eq=False)
class PushReservations:
    """Blocks of a wire cache belong to a reservation from before anybody may write there
    until the request's transfer owns them, or until nobody writes any more."""

    agent: TransferAgent
    rank: int
    generations: Callable[[BlockTables], Generations]
    """What they are now."""
    clock: Callable[[], int]
    arrivals: Arrivals = field(default_factory=Arrivals)
    _wire_blocks: dict[str, tuple[WireCache, BlockTables]] = field(default_factory=dict)
    """Reservation -> its blocks of a wire cache."""
    _reserved: list[Reserved] = field(default_factory=list)

    def admit(self, queued: Queued) -> None:
        """A reservation waits no longer: its producer may write, or never will."""
        if queued.failure is not None:
            error = TransferError("", queued.failure, consumer=self.agent.name)
            self._reserved.append(Reserved(reservation_id=queued.key, error=error))
            return
        if queued.link.wire is not None:
            self._wire_blocks[queued.key] = queued.link.wire, queued.wire_tables
        generations = self.generations(queued.block_tables)
        self.arrivals.open(queued.key, queued.link, queued.block_tables, generations)
        wire_tables = tuple(map(tuple, queued.wire_tables))
        made = Reserved(reservation_id=queued.key, generations=generations, wire_tables=wire_tables)
        self._reserved.append(made)

    def reserved(self) -> list[Reserved]:
        """List reservations that wait no longer, each once."""
        reserved, self._reserved = self._reserved, []
        return reserved

    def cleared(self) -> list[str]:
        """List reservations that are over, and into whose blocks nobody writes any more, each once."""
        clear = self.arrivals.take_clear()
        for reservation_id in clear:
            wire, tables = self._wire_blocks.pop(reservation_id, (None, ()))
            if wire is not None:
                wire.give_back(tables)
        return clear

    def claim(self, reservation_id: str) -> BlockTables | None:
        """Its wire cache blocks belong to the request's transfer from now on; None: it was given up."""
        return self._wire_blocks.pop(reservation_id, (None, None))[1]

    def unclaim(self, reservation_id: str, wire: WireCache, tables: BlockTables) -> None:
        """The request's transfer did not begin: they are the reservation's until nobody writes there."""
        self._wire_blocks[reservation_id] = wire, tables

    def reads(self, ticket: TransferTicket, link: ProducerLink) -> ArrivalReads | None:
        """Return what is waited for, where the KV is pushed."""
        if ticket.reservation_id is None:
            return None
        reservation_id = ticket.reservation_id
        return ArrivalReads(
            ticket,
            self.arrivals,
            link,
            self.agent.transport_as_set,
            lambda: self.arrivals.lost_block(reservation_id, self.generations),
            self.clock,
        )

    def end(self, reservation_id: str, attempt: int | None = None) -> None:
        self.arrivals.stop(reservation_id, self.clock(), attempt)

    def ask_to_stop(self, now_ns: int) -> None:
        """Tell producer ranks that write where nobody waits for it, again and again."""
        for link, request in self.arrivals.stop_requests(now_ns):
            message = StopMessage(request.reservation_id, self.rank, self.agent.name)
            for rank in request.producer_ranks:
                # One that is gone stops nothing: that its engine is over will be told.
                with contextlib.suppress(TransferError):
                    self.agent.notify(link.producers[rank].agent_name, message.encode())
