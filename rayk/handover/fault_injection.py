"""Faults at points of a transfer's life, planted into a rank: how it commits them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayk.engine.rank import EngineRank
from rayk.handover.commands import BlockTables, Describe, RankNews, Reserve, StartRead, WarmUp
from rayk.handover.extension import TransferExtension
from rayk.transfer.agent import TransferAgent
from rayk.transfer.consumer import refusal
from rayk.transfer.faults import FaultyAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.strikes import Strike
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import TransferError

PUSHED_POINTS = ("post", "mid_transfer", "notify")
"""Points at which a rank that pushes acts, through the agent of its pusher."""


def strike_process(kind: str) -> None:
    """What becomes of this rank's process: stopped, or ended as hard as can be."""
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def struck_pusher(agent: TransferAgent, role: str, strikes: Sequence[Strike]) -> TransferAgent:
    """A pusher's agent, with the strikes that hit it; the agent itself where none does."""
    hits = [s for s in strikes if s.point in PUSHED_POINTS and s.remote != role]
    if not hits:
        return agent
    faulty = FaultyAgent(agent, strike_process, role)
    for strike in hits:
        faulty.plant(strike)
    return faulty


DESCRIBE = "describe"
"""The part of a handshake in which an engine says what it is; the agent's reads are the other."""


class FaultyExtension(TransferExtension):
    """A rank that commits faults at the points its agent does not see: describing itself, taking tickets."""

    def __init__(
        self, rank: EngineRank, agent: FaultyAgent, *, strikes: Sequence[Strike], **settings: Any
    ) -> None:
        super().__init__(rank, agent, **settings)
        self._struck = agent
        self._later: list[tuple[float, StartRead]] = []
        self._lost: list[tuple[float, StartRead]] = []
        for strike in strikes:
            agent.plant(strike)

    def execute(self, command: object) -> object:
        """Run one command; see handover.commands."""
        match command:
            case Describe():
                strike = self._struck.passes(DESCRIBE)
                description = super().execute(command)
                assert isinstance(description, CacheDescription)
                return description if strike is None else _other_model(description)
            case WarmUp():
                with self._struck.wiring():
                    return super().execute(command)
            case StartRead() if command.ticket.reservation_id is None:
                return self._struck_start(command)
            case Reserve():
                return self._struck_reserve(command)
        return super().execute(command)

    def poll(self) -> RankNews | None:
        """Drive reads, and what was put off."""
        now = time.monotonic()
        for due in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(due)
            super().execute(due[1])
        for due in [entry for entry in self._lost if entry[0] <= now]:
            self._lost.remove(due)
            error = TransferError(due[1].ticket.request_id, "deadline passed: the ticket never came")
            self._refused.append(refusal(due[1].ticket, error))
        return super().poll()

    def _struck_start(self, command: StartRead) -> object:
        strike = self._struck.passes("reserve")
        kind = strike.kind if strike is not None else ""
        if strike is not None and (kind in ("delay", "reorder") or strike.is_of_rank):
            self._later.append((time.monotonic() + strike.hold_s, command))
            return None
        if kind == "drop":
            self._lost.append((time.monotonic() + command.deadline_s, command))
            return None
        if kind == "duplicate":
            super().execute(command)
        if kind == "corrupt":
            command = replace(command, ticket=_other_ticket(command.ticket))
        return super().execute(command)

    def _struck_reserve(self, command: Reserve) -> object:
        strike = self._struck.passes("reserve")
        if strike is None:
            return super().execute(command)
        time.sleep(strike.hold_s)  # the whole rank is late
        if strike.kind == "drop":
            return TransferError(command.request_id, "the reservation got lost")
        if strike.kind == "duplicate":
            super().execute(command)
        return super().execute(command)


def _other_model(description: CacheDescription) -> CacheDescription:
    """As a rank that loaded something else would describe itself."""
    fingerprint = dict(description.fingerprint)
    name = next(iter(fingerprint))
    fingerprint[name] += " (changed on its way)"
    return replace(description, fingerprint=fingerprint)


def _other_ticket(ticket: TransferTicket) -> TransferTicket:
    return replace(ticket, block_tables=exchanged_blocks(ticket.block_tables))


def exchanged_blocks(block_tables: BlockTables) -> BlockTables:
    """Other blocks in the first table that has any."""
    first = next(i for i, table in enumerate(block_tables) if any(table))
    tables, changed = list(block_tables), block_tables[first]
    tables[first] = (*changed[1:], changed[0]) if len(changed) > 1 else (changed[0] + 1,)
    return tuple(tables)
