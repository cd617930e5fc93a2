"""The faults of a cell's spec as each rank commits them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.handover.fault_injection import DESCRIBE, exchanged_blocks
from rayk.handover.planted import PlantedFault
from rayk.specs.faults import CORRUPT_HANDSHAKE, committing_role, side_of
from rayk.transfer.faults import TransferFault
from rayk.types.fault_table import POINTS, RANK_KINDS

if TYPE_CHECKING:
    from rayk.specs import Cell
    from rayk.specs.experiment import FaultSpec
    from rayk.transfer.ticket import Reservation


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
        transfer_fault = _transfer_fault(fault, cell.spec.transfer.mode)
        if is_here or (transfer_fault.remote is not None and not is_own):
            planted.append(_planted(fault, transfer_fault))
    return tuple(planted)


def _planted(fault: FaultSpec, transfer_fault: TransferFault | None = None) -> PlantedFault:
    return PlantedFault(
        kind=fault.kind,
        point=fault.point,
        layer=fault.layer,
        step=fault.step,
        request=fault.request,
        seed=fault.seed,
        transfer_fault=transfer_fault,
    )


def _transfer_fault(fault: FaultSpec, mode: str) -> TransferFault:
    point = fault.point or ""
    is_of_rank = fault.kind in RANK_KINDS
    if point == "handshake" and (is_of_rank or (fault.kind, point) == CORRUPT_HANDSHAKE):
        point = DESCRIBE
    is_remote = is_of_rank and point != DESCRIBE and fault.engine_role != side_of(point, mode)
    return TransferFault(
        kind=fault.kind,
        point=point,
        step=fault.step or 1,
        delay_s=fault.delay_s,
        byte=fault.seed // 8 % 8,
        bit=fault.seed % 8,
        remote=fault.engine_role if is_remote else None,
    )


def as_it_arrives(cell: Cell, reservation: Reservation, number: int) -> Reservation:
    """The `number`-th reservation of a cell, from 1, at the prefill engine: changed if a fault says so."""
    faults = [f for f in cell.faults if (f.kind, f.point) == ("corrupt", "reserve")]
    if all((f.step or 1) != number for f in faults):
        return reservation
    return replace(reservation, block_tables=exchanged_blocks(reservation.block_tables))
