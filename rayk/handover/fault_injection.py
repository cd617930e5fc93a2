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
from rayk.transfer.faults import TransferFault
from rayk.transfer.faulty_agent import FaultyAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import TransferError

PUSHED_POINTS = ("post", "mid_transfer", "notify")
"""Points at which a rank that pushes acts, through the agent of its pusher."""


def end_or_stop_process(kind: str) -> None:
    """What becomes of this rank's process: stopped, or ended as hard as can be."""
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def pusher_agent(agent: TransferAgent, role: str, faults: Sequence[TransferFault]) -> TransferAgent:
    """Return a pusher's agent, with the faults that hit it; the agent itself where none does."""
    hits = [f for f in faults if f.point in PUSHED_POINTS and f.remote != role]
    if not hits:
        return agent
    faulty = FaultyAgent(agent, end_or_stop_process, role)
    for fault in hits:
        faulty.plant(fault)
    return faulty


DESCRIBE = "describe"
"""The part of a handshake in which an engine says what it is; the agent's reads are the other."""


class FaultyExtension(TransferExtension):
    """A rank that commits faults at the points its agent does not see: describing itself, taking tickets."""

    def __init__(
        self,
        rank: EngineRank,
        agent: FaultyAgent,
        *,
        transfer_faults: Sequence[TransferFault],
        **settings: Any,
    ) -> None:
        super().__init__(rank, agent, **settings)
        self._faulty = agent
        self._later: list[tuple[float, StartRead]] = []
        self._lost: list[tuple[float, StartRead]] = []
        for fault in transfer_faults:
            agent.plant(fault)

    def execute(self, command: object) -> object:
        """Run one command; see handover.commands."""
        match command:
            case Describe():
                fault = self._faulty.passes(DESCRIBE)
                description = super().execute(command)
                assert isinstance(description, CacheDescription)
                return description if fault is None else _other_model(description)
            case WarmUp():
                with self._faulty.wiring():
                    return super().execute(command)
            case StartRead() if command.ticket.reservation_id is None:
                return self._start_with_fault(command)
            case Reserve():
                return self._reserve_with_fault(command)
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

    def _start_with_fault(self, command: StartRead) -> object:
        fault = self._faulty.passes("reserve")
        kind = fault.kind if fault is not None else ""
        if fault is not None and (kind in ("delay", "reorder") or fault.is_of_rank):
            self._later.append((time.monotonic() + fault.hold_s, command))
            return None
        if kind == "drop":
            self._lost.append((time.monotonic() + command.deadline_s, command))
            return None
        if kind == "duplicate":
            super().execute(command)
        if kind == "corrupt":
            command = replace(command, ticket=_other_ticket(command.ticket))
        return super().execute(command)

    def _reserve_with_fault(self, command: Reserve) -> object:
        fault = self._faulty.passes("reserve")
        if fault is None:
            return super().execute(command)
        time.sleep(fault.hold_s)  # the whole rank is late
        if fault.kind == "drop":
            return TransferError(command.request_id, "the reservation got lost")
        if fault.kind == "duplicate":
            super().execute(command)
        return super().execute(command)


def _other_model(description: CacheDescription) -> CacheDescription:
    """A rank that loaded something else would describe itself like this."""
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
