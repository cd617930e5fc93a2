"""What peers send, looked at before anything is allocated, indexed or released by it.

A peer may be of another version, struck by a fault, or somebody who merely knows an agent's name: what makes
no sense ends a request, with a typed error, and never the engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np

from rayk.transfer.agent import TransferAgent
from rayk.transfer.checked_message import is_count
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.lease import ReleaseMessage, RenewMessage
from rayk.transfer.push_messages import PushMessage, StopMessage, decode_push
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.transfer.ticket_seal import is_whole
from rayk.transfer.verify import CanonicalViews
from rayk.types.errors import TransferError

Message = ReleaseMessage | RenewMessage | PushMessage
_log = logging.getLogger(__name__)


class Peers:
    """The ranks of the engines that one rank is connected to: nobody else releases, renews or stops there."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}
        """Engine -> agent names of its ranks, in its last life."""

    def add(self, me: CacheDescription, *sides: Sequence[CacheDescription]) -> None:
        """Engines are connected, one of which is this rank's."""
        for side in sides:
            names = frozenset(rank.agent_name for rank in side)
            if me.agent_name not in names:
                self._names[side[0].engine] = names

    def messages(self, agent: TransferAgent) -> Iterator[tuple[str, Message]]:
        """Yield the notifications that mean something, each with its sender. Nobody speaks for another
        consumer rank; who speaks for a producer rank is looked at where the link is known."""
        for peer, content in agent.notifications():
            found = ReleaseMessage.decode(content) or RenewMessage.decode(content) or decode_push(content)
            if found is None:
                _log.warning("notification of no meaning from %s: %r", peer, content[:80])
            elif not isinstance(found, ReleaseMessage | RenewMessage | StopMessage):
                yield peer, found
            elif found.consumer != peer:
                _log.warning("notification from %s in the name of %s: %r", peer, found.consumer, content[:80])
            elif not any(peer in names for names in self._names.values()):
                _log.warning("notification from %s, of no connected engine: %r", peer, content[:80])
            else:
                yield peer, found


def wrong_head(ticket: TransferTicket) -> str | None:
    """Say why a ticket cannot even be looked up, counted or sliced by: to be asked before anything else."""
    names = ticket.request_id, ticket.lease_id, ticket.engine, ticket.reservation_id or ""
    if not all(isinstance(name, str) for name in names):
        return "its ticket lacks a name"
    numbers = ticket.epoch, ticket.num_tokens, ticket.first_row, ticket.attempt, ticket.draft_row
    if not all(map(is_count, numbers)):
        return "its ticket lacks a number"
    return None


def wrong_lease(ticket: TransferTicket) -> str | None:
    """Say why nobody may renew or release a ticket's lease by it; None where one may."""
    if not is_whole(ticket):
        return "its ticket was changed on the way: the seal does not fit"
    lease_ns = ticket.lease_ns
    return None if lease_ns is None or (is_count(lease_ns) and lease_ns) else "its lease has no length"


def check_ticket(
    ticket: TransferTicket,
    producers: Sequence[CacheDescription],
    me: CacheDescription,
    views: CanonicalViews,
    tables: Sequence[Sequence[int]],
    first_row: int,
) -> None:
    """Raises TransferError unless a ticket of a connected engine can be acted on. `views`: where rows arrive.
    `tables`: our own blocks for it. `first_row`: from which on rows are read.

    Its block tables are looked at where the plan is lowered.
    """
    sizes = [g.block_size for g in me.geometry.groups]
    num_here = min(len(table) * size for table, size in zip(tables, sizes, strict=True))
    wrong = wrong_lease(ticket) or wrong_head(ticket)
    if wrong is None and not 1 <= ticket.num_tokens <= num_here:
        wrong = f"its ticket is of {ticket.num_tokens} tokens, there are blocks for {num_here}"
    if wrong is None and first_row < ticket.first_row:
        wrong = f"rows {first_row} to {ticket.first_row - 1} are neither here nor offered"
    wrong = wrong or _wrong_parts(ticket, len(producers), producers[0].geometry.num_pool_blocks)
    if wrong is None:
        words = views.words(ticket.num_tokens, me.rows_per_group)[1].num_in_all
        digests, shape = ticket.digests, (len(producers), words)
        if not isinstance(digests, np.ndarray) or digests.dtype != np.int64 or digests.shape != shape:
            wrong = f"its digests are not {shape[0]} times {shape[1]} words"
    if wrong is not None:
        raise TransferError(ticket.request_id, wrong)


def _wrong_ids(tables: Sequence[Sequence[int]], num_blocks: int) -> str | None:
    for table in tables:
        if table and (set(map(type, table)) != {int} or min(table) < 0 or max(table) >= num_blocks):
            return f"its block tables name what is no block: there are 0 .. {num_blocks - 1}"
    return None


def _wrong_parts(ticket: TransferTicket, num_producers: int, num_blocks: int) -> str | None:
    times = ticket.digest_ns
    if not isinstance(times, tuple) or len(times) not in (0, num_producers) or not all(map(is_count, times)):
        return "it does not say how long its digests took"
    tables, generations = ticket.block_tables, ticket.generations
    for sides in (tables, generations):
        if not isinstance(sides, tuple) or not all(isinstance(side, tuple) for side in sides):
            return "its block tables are none"
    if [len(t) for t in tables] != [len(t) for t in generations]:
        return "its blocks and their generations are not as many"
    return _wrong_ids(tables, num_blocks)


def wrong_reservation(reservation: Reservation, consumers: Sequence[CacheDescription]) -> str | None:
    """Say why nothing can be pushed into a connected engine's reservation; None where it can. Its block
    tables are looked at where the plan is lowered."""
    if not is_whole(reservation):
        return "its reservation was changed on the way: the seal does not fit"
    num_tokens, num_cached, hold_s = reservation.num_tokens, reservation.num_cached_tokens, reservation.hold_s
    if not (is_count(num_tokens) and is_count(num_cached) and num_cached <= num_tokens and num_tokens):
        return f"its reservation is of {num_tokens!r} tokens, {num_cached!r} of them held"
    if not isinstance(hold_s, int | float) or not math.isfinite(hold_s) or not 0 <= hold_s < 1e9:
        return f"its reservation is held for {hold_s!r} s"
    wires = reservation.wire_tables
    if not isinstance(wires, tuple) or len(wires) not in (0, len(consumers)):
        return "its reservation has no block tables for each rank"
    tables = wires or (reservation.block_tables,)
    if not all(isinstance(t, tuple) and all(isinstance(ids, tuple) for ids in t) for t in tables):
        return "its block tables are none"
    return next(
        (
            why
            for t, c in zip(tables, consumers, strict=False)
            if (why := _wrong_ids(t, c.geometry.num_pool_blocks))
        ),
        None,
    )
