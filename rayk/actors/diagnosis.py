"""After a mismatch: both sides' rows, the first wrong byte, and whose the wrong content is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rayk.handover.commands import Capture, Diagnose, Locate
from rayk.transfer.locate import classify_places
from rayk.types.errors import KVMismatch, RaykError

if TYPE_CHECKING:
    from rayk.actors.engines import EngineHandle
    from rayk.transfer.ticket import TransferTicket

EQUAL_BY_NOW = "stale generation: by now both sides are equal: the producer's bytes changed after its digest"


async def diagnose(
    prefill: EngineHandle,
    decode: EngineHandle,
    ticket: TransferTicket,
    mismatch: KVMismatch,
    deadline_s: float,
) -> KVMismatch:
    """Fetch both sides' rows and name the first wrong byte. Returns what the digests said if that fails."""
    try:
        capture = Capture(ticket.request_id, ticket.num_tokens, ticket.block_tables)
        parts = await prefill.call(capture, deadline_s)
        found = await decode.call(Diagnose(ticket.request_id, tuple(part.rows for part in parts)), deadline_s)
        first = first_of(found)
        if first is None:
            mismatch.classification += f"; {EQUAL_BY_NOW}"
            return mismatch
        if first.found_rows:
            places = await prefill.call(locate_command(first), deadline_s)
            blocks = blocks_of(places)
            control = prefill.leader.holders.options(concurrency_group="control")
            name_holder(first, ticket, places, await control.remote(blocks, deadline_s))
    except RaykError:
        return mismatch
    finally:
        decode.leader.settle.options(concurrency_group="control").remote(ticket.request_id)
    return first


def first_of(found: Sequence[list[KVMismatch]]) -> KVMismatch | None:
    """Return the first wrong byte of what all ranks found, with the wrong bytes of all counted."""
    exact = [m for per_rank in found for m in per_rank]
    if not exact:
        return None
    exact.sort(key=lambda m: (m.group, m.layer, m.field, m.head, m.token))
    exact[0].num_bytes_mismatched = sum(m.num_bytes_mismatched for m in exact)
    return exact[0]


def locate_command(mismatch: KVMismatch) -> Locate:
    """Make the question to the producer's ranks about wrong rows that the consumer cannot explain."""
    return Locate(mismatch.layer, mismatch.field, mismatch.head, mismatch.found_rows)


def blocks_of(places: Sequence[list[Any]]) -> list[int]:
    """List the blocks that all ranks' answers to Locate name."""
    return sorted({place.block for per_rank in places for place in per_rank})


def name_holder(
    mismatch: KVMismatch, ticket: TransferTicket, places: Sequence[list[Any]], holders: dict[int, str]
) -> None:
    """Complete the classification by where the producer's ranks have the rows, and who holds them now."""
    found = sorted((p for per_rank in places for p in per_rank), key=lambda p: (-p.num_rows, p.rank))
    tables = [b for table in ticket.block_tables for b in table]
    mismatch.classification = classify_places(mismatch, found, tables, holders)
    mismatch.found_rows = ()
