"""Producer's half of a hand-over, on rank 0: leases on the blocks of prefilled requests, and their tickets.

All on the loop's thread. A request that sampled its first token leaves the scheduler, its blocks go to a
lease, all ranks digest them, and the ticket goes out. The lease ends when every rank was told so, or at its
deadline.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rayk.engine.leader import RequestEvent
from rayk.handover.commands import BlockTables, MakeTicket, TicketPart
from rayk.handover.rank_answers import RankAnswers
from rayk.handover.tickets import make_ticket

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.handover.commands import RankNews
    from rayk.types.errors import RaykError


class Lending:
    """Open leases of one engine. `leader` is set when the hand-over is attached."""

    def __init__(self, *, engine: str, epoch: int, tp: int) -> None:
        self._engine = engine
        self._epoch = epoch
        self._tp = tp
        self.leader: Leader | None = None
        self._lease_numbers = itertools.count()
        self._lease_ids: dict[str, str] = {}
        """Request id -> its open lease."""
        self._leases: dict[str, RankAnswers[bool]] = {}
        """Lease id -> ranks that were told it is over."""
        self.num_expired = 0

    @property
    def is_open(self) -> bool:
        """Whether any lease holds."""
        return bool(self._leases)

    def holds(self, request_id: str) -> bool:
        """Tell whether a request has a lease."""
        return request_id in self._lease_ids

    def request_of(self, lease_id: str) -> str | None:
        """Return the request of an open lease."""
        return next((r for r, lease in self._lease_ids.items() if lease == lease_id), None)

    def lend(self, request_id: str, num_tokens: int, tables: BlockTables) -> MakeTicket:
        """Take a request and its blocks out of the scheduler; the command by which all ranks write its
        ticket."""
        assert self.leader is not None
        # Numbered: a request that comes again gets another lease, whatever late news of the first.
        lease_id = f"{self._engine}/{self._epoch}/{next(self._lease_numbers)}/{request_id}"
        self._lease_ids[request_id] = lease_id
        self.leader.scheduler.remove(request_id, keep_blocks=True)
        self.leader.manager.lease(request_id, lease_id)
        self._leases[lease_id] = RankAnswers(self._tp)
        return MakeTicket(request_id, lease_id, num_tokens, tables)

    def on_ticket(self, command: MakeTicket, answers: list[TicketPart], error: RaykError | None) -> None:
        """Every rank answered: send the ticket, or the first error."""
        assert self.leader is not None
        if error is not None:
            self.end(command.lease_id)
            self.leader.emit(RequestEvent(request_id=command.request_id, error=error))
            return
        ticket = make_ticket(
            answers,
            request_id=command.request_id,
            lease_id=command.lease_id,
            engine=self._engine,
            epoch=self._epoch,
            num_tokens=command.num_tokens,
            block_tables=command.block_tables,
            lease_ns=answers[0].lease_ns,
            reservation_id=command.reservation_id,
            attempt=command.attempt,
        )
        self.leader.emit(RequestEvent(request_id=command.request_id, payload=ticket))

    def on_news(self, rank: int, news: RankNews) -> None:
        """Count releases of a rank, and leases whose deadline passed there."""
        for lease_id in news.released:
            told = self._leases.get(lease_id)
            if told is not None and told.add(rank, True):
                self.end(lease_id)
        for lease_id in news.expired:
            if lease_id in self._leases:
                self.num_expired += 1
                self.end(lease_id)

    def give_up(self, request_id: str) -> bool:
        """End a request's lease, if it has one. Should a reader be at it now, the generations will tell."""
        lease_id = self._lease_ids.get(request_id)
        if lease_id is None:
            return False
        self.end(lease_id)
        return True

    def end(self, lease_id: str) -> None:
        """Free a lease's blocks; one that is over already has none."""
        if self._leases.pop(lease_id, None) is not None:
            assert self.leader is not None
            self._lease_ids = {r: i for r, i in self._lease_ids.items() if i != lease_id}
            self.leader.manager.release(lease_id)

    def clear(self) -> None:
        """The engine is going down."""
        self._leases.clear()
        self._lease_ids.clear()
