"""One store as rank 0 knows it, from when its blocks are put aside until they are free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from rayk.handover.commands import BlockTables, TicketPart
from rayk.handover.rank_answers import RankAnswers
from rayk.kv.block_pool import NULL_BLOCK
from rayk.offload.messages import StoreAnswer


@dataclass(slots=True, eq=False)
class PendingStore:
    """Blocks put aside until the tier has read them, or ranks have copied them into their outboxes."""

    name: str  # also of its lease
    request_id: str
    num_tokens: int
    tables: BlockTables
    token_ids: tuple[int, ...]
    num_ranks: InitVar[int]
    cache_salt: str | None = None
    next_token: int | None = None  # after `token_ids`, if it is known
    on_kept: Callable[[PendingStore, StoreAnswer], None] | None = None
    """Told of the tier's answer, if the store is to be kept by its name."""
    on_free: Callable[[PendingStore], None] | None = None  # told once its blocks are free
    is_urgent: bool = False  # somebody waits for its blocks: it is not dropped, and goes first
    first_row: int = 0
    draft_row: int = 0  # the first that is present in draft layers
    outbox_tables: BlockTables | None = None  # the blocks of outboxes that it holds
    has_left: bool = False  # its own blocks are free
    began_ns: int = 0
    parts: RankAnswers[TicketPart] = field(init=False)
    released: RankAnswers[bool] = field(init=False)
    num_bytes: int = 0  # that the tier took over

    def __post_init__(self, num_ranks: int) -> None:
        self.parts, self.released = RankAnswers(num_ranks), RankAnswers(num_ranks)

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine that it holds, maybe with others."""
        return 0 if self.has_left else len({b for t in self.tables for b in t} - {NULL_BLOCK})
