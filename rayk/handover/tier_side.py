"""What the parts of an engine's offloading share: the tier as its leader reaches it, costs and counters."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rayk.handover.commands import HoldTicket, LetGo
from rayk.handover.outbox_room import OutboxRoom
from rayk.kv.outbox import num_outbox_blocks
from rayk.kv.specs import page_bytes, rows_per_block
from rayk.offload.backoff import Backoff
from rayk.offload.costs import CostModel
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.transfer.handshake import row_group_blocks
from rayk.types.errors import KVMismatch

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.offload.host import HostTier
    from rayk.parallel.shard import EngineShape
    from rayk.transfer.ticket import TransferTicket
    from rayk.types.errors import RaykError
    from rayk.types.offload import OffloadSettings, Weighing

LOG = logging.getLogger(__name__)


class Tier(Protocol):
    """A host tier as an engine's leader reaches it. Calls return at once; answers, and word of its end, come
    on the loop's thread."""

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None: ...

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None: ...

    def drop(self, kept_as: str) -> None:
        """Nobody will load what was kept by this name."""
        ...

    def doubt(self, ticket: TransferTicket) -> None:
        """What was read is not what the tier's ticket says."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TierFacts:
    """What an engine must know of the tier it is attached to. Picklable."""

    epoch: int
    unit_tokens: int  # prefixes are found that are multiples of it
    row_unit_tokens: int  # what it holds of a sequence is told apart from the rest at multiples of it


def facts_of(tier: HostTier) -> TierFacts:
    groups = tier.manager.groups
    unit_tokens = math.lcm(*(g.spec.block_size for g in groups))
    return TierFacts(
        epoch=tier.description.epoch, unit_tokens=unit_tokens, row_unit_tokens=row_group_blocks(groups)
    )


@dataclass(eq=False)
class TierSide:
    """Everything runs on the loop's thread."""

    engine: str
    epoch: int
    shape: EngineShape
    settings: OffloadSettings
    commands: list[object]  # what all ranks are to do at the next turn; appended to
    costs: CostModel = field(default_factory=CostModel)
    counts: Counter[str] = field(default_factory=Counter)
    """Since the engine was formed: events, tokens and bytes, by name."""
    reads: Backoff = field(default_factory=Backoff)
    """Backs off from what was to come from the tier: loads, and swaps back."""
    tier: Tier | None = None
    outbox: OutboxRoom | None = None  # None: ranks have no outboxes
    _facts: TierFacts | None = None
    _leader: Leader | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.shape.num_ranks

    @property
    def leader(self) -> Leader:
        assert self._leader is not None, "not attached to a leader"
        return self._leader

    @property
    def facts(self) -> TierFacts:
        """They are of the tier that is attached, or was last."""
        assert self._facts is not None, "no tier was ever attached"
        return self._facts

    def attach(self, leader: Leader | None = None, facts: TierFacts | None = None) -> None:
        """Set whom this belongs to, or what the tier is. Raises UserError for too small an outbox."""
        self._leader, self._facts = leader or self._leader, facts or self._facts
        if leader is not None and self.settings.outbox_bytes:
            groups, num_blocks = leader.manager.all_groups, leader.manager.pool.num_blocks
            there = num_outbox_blocks(groups, self.shape, num_blocks, self.settings.outbox_bytes)
            self.outbox = OutboxRoom(groups, there)
        self.costs.max_step_tokens = self.leader.scheduler.max_batch_tokens

    def doubt(self, ticket: TransferTicket, failure: RaykError) -> None:
        """Have the tier look at its pages, if what was read by its ticket is not what that says."""
        if self.tier is not None and isinstance(failure, KVMismatch) and ticket.epoch == self.facts.epoch:
            self.tier.doubt(ticket)

    def decline(self, ticket: TransferTicket | None) -> None:
        """Give back what the tier offered: nobody reads it."""
        if ticket is not None and self.tier is not None and ticket.epoch == self.facts.epoch:
            self.commands += (HoldTicket(ticket), LetGo(ticket.request_id))

    def may_read(self, setting: Weighing) -> bool:
        """Whether to ask the tier for anything just now. Whoever wants it always asks always."""
        return setting != "auto" or self.reads.may_try(self.leader.clock())

    def read_failed(self, setting: Weighing, began_ns: int, why: str, ticket: TransferTicket | None) -> None:
        """What was asked for at `began_ns`, or offered by the ticket, was waited for in vain."""
        if setting != "auto" or self.tier is None:
            return
        if ticket is not None and ticket.epoch != self.facts.epoch:
            return  # the tier was lost, and another one is there
        pause_s = self.reads.failed(began_ns, self.leader.clock(), why)
        if pause_s:
            LOG.warning("%s asks its host tier for nothing for %.0f s: %s", self.engine, pause_s, why)

    def new_name(self, kind: str, request_id: str) -> str:
        """Return a name for a store or a swap that no other has, on any engine."""
        return f"{self.engine}/{self.epoch}/{kind}{next(self._numbers)}/{request_id}"

    def bytes_of(self, num_tokens: int, first_row: int) -> int:
        """Canonical bytes of the live rows of a sequence from a row on: what moves, replicas aside."""
        total = 0
        for g in self.leader.manager.all_groups:
            row_bytes = page_bytes(g.spec) * len(g.layers) // rows_per_block(g.spec)
            live = g.spec.live_rows(num_tokens)
            total += row_bytes * len(range(max(live.start, first_row), live.stop))
        return total


def moving_ns(info: dict[str, Any]) -> int:
    """Say how long ranks took to read and to prove, whatever it was that they waited for before. `info`: of
    an arrival (`receiving`)."""
    return sum(info.get("stage_ns", {}).get(stage, 0) for stage in ("read", "fence", "verify"))
