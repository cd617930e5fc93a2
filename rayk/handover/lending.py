"""Producer's half of a hand-over, on rank 0: leases on the blocks of prefilled requests, and their tickets.

All on the loop's thread. A request that sampled its first token leaves the scheduler, its blocks go to a
lease, all ranks digest them, and the ticket goes out. The lease ends when every rank was told so, or at its
deadline. What goes to a host tier is copied to outboxes, where there are some, and its blocks are free then.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.engine.leader import RequestEvent
from rayk.handover.commands import BlockTables, MakeTicket, TicketPart
from rayk.handover.rank_answers import RankAnswers
from rayk.handover.tickets import make_ticket
from rayk.offload.outbox import outbox_name

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.handover.commands import RankNews
    from rayk.handover.outbox_room import OutboxRoom
    from rayk.handover.tier_side import TierSide
    from rayk.types.errors import RaykError

LOG = logging.getLogger(__name__)


class Lending:
    """Open leases of one engine. `leader` is set when the hand-over is attached, and so is `side` where there
    is a host tier."""

    def __init__(self, *, engine: str, epoch: int, num_ranks: int) -> None:
        self._engine = engine
        self._epoch = epoch
        self._num_ranks = num_ranks
        self.leader: Leader | None = None
        self._lease_numbers = itertools.count()
        self._lease_ids: dict[str, str] = {}
        """Request id -> its open lease."""
        self._leases: dict[str, RankAnswers[bool]] = {}
        """Lease id -> ranks that were told it is over."""
        self.side: TierSide | None = None
        self._for_tier: deque[MakeTicket] = deque()
        """Those that wait for room in outboxes."""
        self._in_outboxes: dict[str, BlockTables] = {}
        """Lease id -> the blocks of outboxes that it holds."""
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
        self._leases[lease_id] = RankAnswers(self._num_ranks)
        draft_row = self.leader.manager.first_draft_row(lease_id)
        return MakeTicket(request_id, lease_id, num_tokens, tables, draft_row=draft_row)

    def wait_for_room(self, command: MakeTicket) -> None:
        """A host tier is to read the ticket's blocks: `turn` returns it when outboxes have room."""
        self._for_tier.append(command)

    def turn(self) -> list[MakeTicket]:
        """Take those out of the queue that may be written now. What no outbox can hold, or where there are
        none, is read from the ranks' own memory."""
        ready = []
        while self._for_tier:
            command, outbox = self._for_tier[0], self._outbox
            rows = range(command.num_tokens)
            needed = 0 if outbox is None else outbox.num_needed(command.block_tables, rows)
            if command.lease_id not in self._leases:
                pass  # it was given up
            elif outbox is None or needed > outbox.num_blocks:
                if outbox is not None:
                    self._pass_by(command, needed, outbox)
                ready.append(command)
            elif needed > outbox.pool.num_free_blocks:
                break
            else:
                taken = self._in_outboxes[command.lease_id] = outbox.take(command.block_tables, rows)
                ready.append(replace(command, outbox_tables=taken))
            self._for_tier.popleft()
        return ready

    @property
    def _outbox(self) -> OutboxRoom | None:
        return None if self.side is None else self.side.outbox

    def _pass_by(self, command: MakeTicket, needed: int, outbox: OutboxRoom) -> None:
        assert self.side is not None
        self.side.counts["handovers_too_large"] += 1
        what = command.request_id, needed, outbox.num_blocks
        LOG.warning("%s takes %d blocks of outboxes that have %d: it is read past them", *what)

    @property
    def in_outboxes(self) -> tuple[str, ...]:
        """Leases that are read from outboxes."""
        return tuple(self._in_outboxes)

    def on_ticket(self, command: MakeTicket, answers: list[TicketPart], error: RaykError | None) -> None:
        """Every rank answered: send the ticket, or the first error."""
        assert self.leader is not None
        if error is not None:
            self.end(command.lease_id)
            self.leader.emit(RequestEvent(request_id=command.request_id, error=error))
            return
        tables, engine = command.block_tables, self._engine
        if command.outbox_tables is not None:
            tables, engine = command.outbox_tables, outbox_name(engine)
            self.leader.manager.release(command.lease_id)
        ticket = make_ticket(
            answers,
            request_id=command.request_id,
            lease_id=command.lease_id,
            engine=engine,
            epoch=self._epoch,
            num_tokens=command.num_tokens,
            block_tables=tables,
            lease_ns=answers[0].lease_ns,
            reservation_id=command.reservation_id,
            attempt=command.attempt,
            draft_row=command.draft_row,
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
            taken = self._in_outboxes.pop(lease_id, None)
            if taken is not None and self._outbox is not None:
                self._outbox.give_back(taken)

    def clear(self) -> None:
        """The engine is going down."""
        for known in (self._leases, self._lease_ids, self._for_tier, self._in_outboxes):
            known.clear()
