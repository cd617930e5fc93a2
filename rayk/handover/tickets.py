"""Tickets on rank 0, from what every rank of the engine answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayk.handover.commands import TicketPart
from rayk.transfer.push_reservations import Reserved
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.ticket_seal import sealed


def make_ticket(parts: Sequence[TicketPart], **fields: Any) -> TransferTicket:
    """Make and seal a ticket. `parts`: every rank's, in order; `fields`: what no part has, and `lease_ns`
    if the lease needs renewal."""
    ticket = TransferTicket(
        generations=agreed_generations(parts),
        digests=np.stack([p.digests for p in parts]),
        digest_ns=tuple(p.digest_ns for p in parts),
        **fields,
    )
    return sealed(ticket)


def agreed_generations(parts: Sequence[TicketPart | Reserved]) -> tuple[tuple[int, ...], ...]:
    """Return the generations of blocks, of which all ranks count the same."""
    generations = parts[0].generations
    assert all(p.generations == generations for p in parts), "ranks disagree on generations"
    return generations
