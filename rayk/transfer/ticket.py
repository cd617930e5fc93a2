"""What a producer engine hands to a consumer engine for one request."""

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
    digest_ns: tuple[int, ...] = ()
    """How long each producer rank took for them; empty where nobody says."""
