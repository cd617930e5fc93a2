"""One request's read by a simulated decode engine: what it moves, when, and what of it can be used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayk.handover.commands import StartRead
from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.simulate.clock import Event
from rayk.simulate.links import Flow
from rayk.simulate.network import Pairing
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.valid_prefix import LayerProof, proven_rows
from rayk.types.errors import TransferError
from rayk.types.rows import TransferRow


@dataclass(slots=True, eq=False)
class SimRead:
    """A read from its command to its outcome, and on until nothing of it is in flight."""

    command: StartRead
    pair: Pairing
    rows: list[list[TransferRow]]
    """Those of each rank of the reader."""
    began_ns: int
    deadline_ns: int
    post_ns: int = 0
    """How long posting takes the slowest rank."""
    wait_ns: int = 0
    """How long after it the last byte is there, if nothing else moves."""
    stage_ns: dict[str, int] = field(default_factory=dict)
    flow: Flow | None = None
    """Its bytes under way, where the reader does not copy them itself."""
    timer: Event | None = None
    """Wakes the engine at the deadline."""
    fenced_ns: int | None = None
    """When the generations of what was read are here, once they are asked for."""
    has_arrived: bool = False
    lost: frozenset[int] = frozenset()
    """Producer's blocks that were handed out again before all was here."""

    @property
    def ticket(self) -> TransferTicket:
        return self.command.ticket

    @property
    def moves(self) -> bool:
        """Whether anything is read at all."""
        return any(row.bytes for rank in self.rows for row in rank)

    @property
    def rank_bytes(self) -> int:
        """Bytes that come to the rank which gets most."""
        return max((sum(row.bytes for row in rank) for rank in self.rows), default=0)

    def lay_out(self) -> None:
        """Put the rows' posts one after another on each rank, and work out how long all takes."""
        ends, costs = [], self.pair.costs
        for rank in self.rows:
            at_ns, num_bytes, num_descriptors = float(self.began_ns), 0, 0
            for row in (row for row in rank if row.bytes):
                num_joined = row.num_descriptors_merged or 0
                post_ns = costs.post.ns(row.bytes, num_joined)
                row.post_ns, row.begin_ns = round(post_ns), round(at_ns)
                at_ns += post_ns
                num_bytes += row.bytes
                num_descriptors += num_joined
            wait_ns = costs.wait.ns(num_bytes, num_descriptors) if num_bytes else 0.0
            ends.append((at_ns - self.began_ns, at_ns + wait_ns - self.began_ns))
        self.post_ns = round(max((post_ns for post_ns, _ in ends), default=0.0))
        self.wait_ns = max(0, round(max((end_ns for _, end_ns in ends), default=0.0)) - self.post_ns)

    def arrived(self, now_ns: int) -> None:
        """All bytes are here, as is seen now."""
        self.has_arrived = True
        self.stage_ns["read"] = now_ns - self.began_ns
        for row in (row for rank in self.rows for row in rank if row.begin_ns is not None):
            row.span(row.begin_ns or 0, now_ns)

    def proved(self, verify_ns: int) -> None:
        """Its digests were compared."""
        self.stage_ns["verify"] = verify_ns
        for row in (row for rank in self.rows for row in rank):
            row.digest_ns = verify_ns + max(self.ticket.digest_ns, default=0)

    def outcome(self, error: TransferError | None = None, *, is_draining: bool = False) -> TransferOutcome:
        """Tell how it ended."""
        rows = tuple(row for rank in self.rows for row in rank)
        for row in rows:
            row.verdict = "OK" if error is None else "TRANSFER_ERROR"
        return TransferOutcome(
            request_id=self.ticket.request_id,
            lease_id=self.ticket.lease_id,
            error=error,
            rows=rows,
            stage_ns=self.stage_ns,
            is_draining=is_draining,
            began_ns=self.began_ns,
        )


def offered_blocks(ticket: TransferTicket) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks that a ticket offers, with their generations."""
    each = [
        pair
        for blocks, generations in zip(ticket.block_tables, ticket.generations, strict=True)
        for pair in zip(blocks, generations, strict=True)
        if pair[0] != NULL_BLOCK
    ]
    return tuple(block for block, _ in each), tuple(generation for _, generation in each)


def layer_proofs(read: SimRead, groups: Sequence[KVCacheGroup], first_row: int) -> list[LayerProof]:
    """Say what of a failed read arrived all the same; rows before `first_row` were here. `groups`: of the
    reader."""
    ticket = read.ticket
    homes = {key: group for group in read.pair.plans.lenders for key in group.keys}
    proofs = []
    for group in groups:
        for layer, part in group.keys:
            live = group.seen_by(layer).live_rows(ticket.num_tokens)
            home = homes[layer, part]
            wrong: Collection[int] = range(first_row, ticket.num_tokens)
            if read.has_arrived:
                wrong = _rows_of(ticket.block_tables[home.index], read.lost, home.spec.block_size, first_row)
            proofs.append(LayerProof(group.index, layer, proven_rows(live, 1, wrong)))
    return proofs


def _rows_of(table: Sequence[int], lost: Collection[int], block_size: int, first_row: int) -> list[int]:
    """List the positions that blocks of a table hold, from `first_row` on."""
    return [
        row
        for index, block in enumerate(table)
        if block in lost
        for row in range(max(first_row, index * block_size), (index + 1) * block_size)
    ]
