"""Consumer's half of a push, on rank 0: blocks reserved before anything is computed, until the ticket comes.

All on the loop's thread, but for `open_reservations`. A reservation is given out when there are blocks, and
claimed by the request's ticket; one that nobody claims is given up, which every producer rank that may write
has to confirm first.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import BlockTables, EndReservation, Reserve
from rayk.handover.rank_answers import RankAnswers
from rayk.handover.tickets import agreed_generations
from rayk.transfer.handshake import row_group_blocks
from rayk.transfer.ticket import Reservation
from rayk.transfer.ticket_seal import sealed
from rayk.types.errors import DeadlineExceeded, RaykError

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.handover.commands import RankNews
    from rayk.kv.manager import LocalPrefix
    from rayk.transfer.push_reservations import Reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservationRequest:
    """A request that wants blocks."""

    request_id: str
    token_ids: tuple[int, ...]
    """Tokens of the prompt."""
    cache_salt: str | None
    producer: str
    """The engine that will write."""
    reserve_s: float
    """How long it waits for blocks."""
    hold_s: float
    """How long they wait for its ticket."""
    asked_ns: int
    taken_ns: int
    """When the engine's loop saw it, between two steps."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class _OpenReservation:
    """Blocks that may be written."""

    wanted: ReservationRequest
    reservation_id: str
    block_tables: BlockTables
    prefix: LocalPrefix
    """What need not be written."""
    reserved_ns: int
    parts: RankAnswers[Reserved]
    """What each rank answered that has room."""
    is_given: bool = False
    """Whether the reservation has left."""

    @property
    def until_ns(self) -> int:
        """When it is given up."""
        return self.reserved_ns + int(self.wanted.hold_s * 1e9)


class Reservations:
    """Reservations of one engine. `leader` is set when the hand-over is attached."""

    def __init__(self, *, engine: str, epoch: int, num_ranks: int, commands: list[object]) -> None:
        """`commands`: what all ranks are to do at the next turn; appended to."""
        self._engine = engine
        self._epoch = epoch
        self._num_ranks = num_ranks
        self._commands = commands
        self.leader: Leader | None = None
        self._numbers = itertools.count()
        self._queued: deque[ReservationRequest] = deque()
        self._open: dict[str, _OpenReservation] = {}
        """Request id -> its blocks."""
        self._ending: dict[str, RankAnswers[bool]] = {}
        """Reservation that was given up -> ranks where nobody writes any more."""

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for blocks, or may write into some."""
        return bool(self._queued or self._open or self._ending)

    @property
    def open_reservations(self) -> tuple[str, ...]:
        """Those into whose blocks somebody may write, or that nobody has claimed. From any thread."""
        unclaimed = tuple(self._open.values())  # at once: the loop's thread goes on
        return (*(r.reservation_id for r in unclaimed), *self._ending)

    def ask(self, wanted: ReservationRequest) -> None:
        """A request waits for blocks."""
        self._queued.append(wanted)

    def turn(self) -> None:
        """Called before each turn, it gives up what waited too long and reserves what blocks allow."""
        if not self.is_busy:
            return
        assert self.leader is not None
        now = self.leader.clock()
        for open_reservation in [r for r in self._open.values() if r.until_ns <= now]:
            self.give_up(open_reservation.wanted.request_id)
        waiting = [r.wanted for r in self._open.values() if not r.is_given]
        for wanted in [w for w in (*self._queued, *waiting) if now - w.asked_ns > w.reserve_s * 1e9]:
            self.give_up(wanted.request_id)
            error = DeadlineExceeded(f"waiting for KV blocks for {wanted.request_id}", wanted.reserve_s)
            self.leader.emit(RequestEvent(request_id=wanted.request_id, error=error))
        scheduler = self.leader.scheduler
        while self._queued and not scheduler.is_short_of_blocks and not scheduler.num_away:
            wanted = self._queued[0]
            reservation_id = f"{self._engine}/{self._epoch}/r{next(self._numbers)}/{wanted.request_id}"
            manager = self.leader.manager
            unit = row_group_blocks(manager.groups)
            prefix = manager.find_local_prefix(
                wanted.request_id, wanted.token_ids, wanted.num_tokens, unit, wanted.cache_salt
            )
            tables = reserve_blocks(self.leader, reservation_id, wanted.num_tokens, prefix)
            if tables is None:
                return
            self._queued.popleft()
            self._open[wanted.request_id] = _OpenReservation(
                wanted, reservation_id, tables, prefix, now, RankAnswers(self._num_ranks)
            )
            here = frozenset(block for blocks in prefix.blocks for block in blocks)
            at = wanted.request_id, reservation_id, wanted.producer
            self._commands.append(Reserve(*at, tables, wanted.num_tokens, here))

    def on_refused(self, command: Reserve, error: RaykError | None) -> None:
        """A rank cannot do what it was told, if there is an error."""
        open_reservation = self._open.get(command.request_id)
        if (
            error is not None
            and open_reservation is not None
            and open_reservation.reservation_id == command.reservation_id
        ):
            self._refuse(open_reservation, error)

    def _refuse(self, open_reservation: _OpenReservation, error: RaykError) -> None:
        assert self.leader is not None
        request_id = open_reservation.wanted.request_id
        self.give_up(request_id)
        self.leader.emit(RequestEvent(request_id=request_id, error=error))

    def _on_reserved(self, rank: int, part: Reserved) -> None:
        """A rank has room: send the reservation when all have it, or the first error."""
        open_reservation = next(
            (r for r in self._open.values() if r.reservation_id == part.reservation_id), None
        )
        if open_reservation is None or open_reservation.is_given:
            return  # given up meanwhile
        if part.error is not None:
            self._refuse(open_reservation, part.error)
            return
        if open_reservation.parts.add(rank, part):
            self._give(open_reservation, open_reservation.parts.in_order())

    def _give(self, open_reservation: _OpenReservation, parts: list[Reserved]) -> None:
        assert self.leader is not None
        wanted = open_reservation.wanted
        reservation = Reservation(
            request_id=wanted.request_id,
            reservation_id=open_reservation.reservation_id,
            engine=self._engine,
            epoch=self._epoch,
            num_tokens=wanted.num_tokens,
            block_tables=open_reservation.block_tables,
            generations=agreed_generations(parts),
            hold_s=wanted.hold_s,
            num_cached_tokens=open_reservation.prefix.num_tokens,
            wire_tables=tuple(p.wire_tables for p in parts) if parts[0].wire_tables else (),
        )
        open_reservation.is_given, open_reservation.reserved_ns = True, self.leader.clock()
        info = EventInfo(submitted_ns=wanted.asked_ns, taken_ns=wanted.taken_ns)
        event = RequestEvent(request_id=wanted.request_id, payload=sealed(reservation), info=info)
        self.leader.emit(event, ends=False)

    def claim(self, request_id: str, reservation_id: str) -> tuple[BlockTables, LocalPrefix] | None:
        """The request's ticket is here: its blocks are the request's from now on, and what of them was not
        written. None where they were given up."""
        assert self.leader is not None
        open_reservation = self._open.get(request_id)
        if open_reservation is None or open_reservation.reservation_id != reservation_id:
            return None
        del self._open[request_id]
        self.leader.manager.rename(reservation_id, request_id)
        return open_reservation.block_tables, open_reservation.prefix

    def give_up(self, request_id: str) -> bool:
        """Nobody will claim a request's blocks: they are freed when nobody writes into them any more. False
        where it has none."""
        for wanted in self._queued:
            if wanted.request_id == request_id:
                self._queued.remove(wanted)
                self._forget_keys(request_id)
                return True
        open_reservation = self._open.pop(request_id, None)
        if open_reservation is None:
            return False
        self._forget_keys(request_id)
        self._ending[open_reservation.reservation_id] = RankAnswers(self._num_ranks)
        self._commands.append(EndReservation(open_reservation.reservation_id))
        return True

    def _forget_keys(self, request_id: str) -> None:
        """What its prompt is known by; its blocks are under its reservation's name."""
        assert self.leader is not None
        self.leader.manager.free(request_id)

    def on_news(self, rank: int, news: RankNews) -> None:
        """Count the ranks that have room, and those where a reservation that was given up is clear."""
        assert self.leader is not None
        for part in news.reserved:
            self._on_reserved(rank, part)
        for reservation_id in news.cleared:
            clear = self._ending.get(reservation_id)  # none if it was claimed, and its request is over
            if clear is not None and clear.add(rank, True):
                del self._ending[reservation_id]
                self.leader.manager.free(reservation_id)

    def clear(self) -> None:
        """The engine is going down."""
        self._queued.clear()
        self._open.clear()
        self._ending.clear()


def reserve_blocks(
    leader: Leader, key: str, num_tokens: int, local_prefix: LocalPrefix | None = None
) -> BlockTables | None:
    """List blocks for the first `num_tokens` tokens of a sequence, which come from elsewhere, but for what
    is in `local_prefix`; None while they are short.

    Requests that are here already have come first: each keeps a block per group to go on with.
    """
    manager = leader.manager
    updates = manager.reserve_live(key, num_tokens, local_prefix)
    if updates is None:
        return None
    if not may_reserve(leader, 0):
        manager.unreserve(key)
        return None
    return tuple(ids for _, ids in updates)


def may_reserve(leader: Leader, num_blocks: int) -> bool:
    """Tell whether so many blocks may be set aside: enough are left for the requests that are here."""
    scheduler, manager = leader.scheduler, leader.manager
    num_here = scheduler.num_running + scheduler.num_waiting
    return manager.pool.num_free_blocks - num_blocks >= num_here * len(manager.groups)
