"""Faults at points of a transfer's life, planted into a rank: which ranks commit them, and how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayk.actors.commands import Describe, StartRead, Wire
from rayk.actors.extension import RankNews, TransferExtension, refusal
from rayk.actors.planted import PlantedFault
from rayk.engine.rank import EngineRank
from rayk.specs import Cell
from rayk.specs.experiment import FaultSpec
from rayk.specs.faults import CORRUPT_HANDSHAKE, committing_role, side_of
from rayk.transfer.fault_table import POINTS, RANK_KINDS
from rayk.transfer.faults import FaultyAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.strikes import Strike
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import TransferError

DESCRIBE = "describe"
"""The part of a handshake in which an engine says what it is; the agent's reads are the other."""


def faults_of(cell: Cell, role: str, index: int, rank: int, tp: int) -> tuple[PlantedFault, ...]:
    """The faults that a rank of engine `index` of this role commits, or sets off at a rank of the other side.

    A fault that names no rank is the last one's.
    """
    planted: list[PlantedFault] = []
    for fault in cell.faults:
        is_own = role == committing_role(fault, cell.spec.transfer.mode)
        is_here = (
            is_own
            and fault.engine in (None, index)
            and rank == (fault.rank if fault.rank is not None else tp - 1)
        )
        if fault.point not in POINTS:
            planted += [_planted(fault)] if is_here else []
            continue
        strike = _strike(fault, cell.spec.transfer.mode)
        if is_here or (strike.remote is not None and not is_own):
            planted.append(_planted(fault, strike))
    return tuple(planted)


def _planted(fault: FaultSpec, strike: Strike | None = None) -> PlantedFault:
    return PlantedFault(
        kind=fault.kind,
        point=fault.point,
        layer=fault.layer,
        step=fault.step,
        request=fault.request,
        seed=fault.seed,
        strike=strike,
    )


def _strike(fault: FaultSpec, mode: str) -> Strike:
    point = fault.point or ""
    is_of_rank = fault.kind in RANK_KINDS
    if point == "handshake" and (is_of_rank or (fault.kind, point) == CORRUPT_HANDSHAKE):
        point = DESCRIBE
    is_remote = is_of_rank and point != DESCRIBE and fault.engine_role != side_of(point, mode)
    return Strike(
        kind=fault.kind,
        point=point,
        step=fault.step or 1,
        delay_s=fault.delay_s,
        seed=fault.seed,
        remote=fault.engine_role if is_remote else None,
    )


def strike_process(kind: str) -> None:
    """What becomes of this rank's process: stopped, or ended as hard as can be."""
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


class StruckExtension(TransferExtension):
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
        """Run one command; see actors.commands."""
        match command:
            case Describe():
                strike = self._struck.passes(DESCRIBE)
                description = super().execute(command)
                assert isinstance(description, CacheDescription)
                return description if strike is None else _other_model(description)
            case Wire():
                with self._struck.wiring():
                    return super().execute(command)
            case StartRead():
                return self._struck_start(command)
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
            self._refused.append(refusal(due[1], error))
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


def _other_model(description: CacheDescription) -> CacheDescription:
    """As a rank that loaded something else would describe itself."""
    fingerprint = dict(description.fingerprint)
    name = next(iter(fingerprint))
    fingerprint[name] += " (changed on its way)"
    return replace(description, fingerprint=fingerprint)


def _other_ticket(ticket: TransferTicket) -> TransferTicket:
    """With two blocks exchanged, or one that is another."""
    first = next(i for i, table in enumerate(ticket.block_tables) if any(table))
    tables = list(ticket.block_tables)
    tables[first] = (
        (*tables[first][1:], tables[first][0]) if len(tables[first]) > 1 else (tables[first][0] + 1,)
    )
    return replace(ticket, block_tables=tuple(tables))
