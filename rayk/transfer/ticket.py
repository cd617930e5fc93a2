"""What engines hand each other for one request: where it may be pushed, and what to check and release."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferTicket:
    """Everything a consumer needs to read and check one request's KV. Filled by the producer engine.

    Picklable. Valid as long as the lease holds at the producer.
    """

    request_id: str
    lease_id: str
    engine: str
    """The producer engine's name, and below which life of it."""
    epoch: int
    num_tokens: int
    """Tokens whose KV the producer computed."""
    block_tables: tuple[tuple[int, ...], ...]
    """Per group, the producer manager's block ids by position in the sequence; null where nothing is live."""
    generations: tuple[tuple[int, ...], ...]
    """Per group, the generation of each of those blocks when the ticket was written."""
    digests: npt.NDArray[np.int64]
    """[producer rank, words], each row as TransferRank.digests gives it."""
    lease_ns: int | None = None
    """The lease ends when nobody has renewed it for so long; None: it needs no renewal."""
    digest_ns: tuple[int, ...] = ()
    """How long each producer rank took for them; empty where nobody says."""
    first_row: int = 0
    """Rows before it are not offered: a consumer has them. Blocks of theirs may be null, and digests cover
    none of them."""
    reservation_id: str | None = None
    """Where the KV is pushed to; None: the consumer reads it."""
    attempt: int = 0
    """Which attempt to push it is whole: one that was preempted began again."""
    draft_row: int = 0
    """Rows of draft layers before it lack: a drafter goes on without them, whatever their bytes."""
    seal: str = ""
    """Says that all of it is as it was written, see transfer.seal; empty: nobody sealed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Blocks of a consumer engine that a producer engine may write one request's KV into. Picklable.

    Valid until the consumer asks the producer's ranks to stop: it does so when `hold_s` are over.
    """

    request_id: str
    reservation_id: str
    engine: str
    """The consumer engine's name, and below which life of it."""
    epoch: int
    num_tokens: int
    """Tokens of the prompt."""
    block_tables: tuple[tuple[int, ...], ...]
    """Per group, the consumer manager's block ids by position in the sequence; null where nothing is live."""
    generations: tuple[tuple[int, ...], ...]
    """Per group, the generation of each of those blocks since they were reserved."""
    hold_s: float
    """How long the consumer waits for the ticket."""
    num_cached_tokens: int = 0
    """Live rows of so many first tokens are at the consumer already, in blocks that others may hold, too:
    they are not written."""
    wire_tables: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Where formats differ: by consumer rank, the blocks of its wire cache to write into instead, per group
    of the producer's."""
    seal: str = ""
    """Says that all of it is as it was written, see transfer.seal; empty: nobody sealed it."""

    def tables(self, consumer_rank: int) -> tuple[tuple[int, ...], ...]:
        """Tell where the request's KV is written at a consumer rank."""
        return self.wire_tables[consumer_rank] if self.wire_tables else self.block_tables
