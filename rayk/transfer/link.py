"""What a consumer rank keeps ready for one producer engine: plan, descriptor lists, whom to release."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rayk.kv.geometry import GENERATION_BYTES
from rayk.transfer.agent import DescriptorList, Handle, TransferAgent
from rayk.transfer.drafts import left_out
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.plan import Pattern, PatternKey, TransferPlan, plan_transfer, release_senders
from rayk.transfer.stretches import Stretches
from rayk.transfer.verify import CanonicalViews
from rayk.transfer.wire import WireCache

PREPARED_PER_READ = 32
"""Descriptor lists kept of each producer rank and group: a whole segment, and its parts. A list is as long as
its pattern has runs times the blocks of both engines."""


class Landing:
    """Registered memory where generations read from peers land, in slots of 8 bytes."""

    def __init__(self, agent: TransferAgent, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._buffer = torch.full((num_slots * GENERATION_BYTES,), -1, dtype=torch.int8, device=device)
        self.base_address = agent.register(self._buffer)
        self._slots = Stretches(num_slots)
        words = self._buffer.view(torch.int64)
        # NumPy fills and lists few words in a fifth of torch's time.
        self._words = words if words.is_cuda else words.numpy()

    def take(self, num_slots: int) -> range | None:
        """Take consecutive slots filled with -1 (no generation); None where there is no room for them."""
        slots = self._slots.take(num_slots)
        if slots is None:
            return None
        self._words[slots.start : slots.stop] = -1
        if self._buffer.is_cuda:
            # A peer's bytes may land before a queued kernel runs, which would then wipe them out.
            torch.cuda.current_stream(self._buffer.device).synchronize()
        return slots

    def give_back(self, slots: range) -> tuple[int, ...]:
        """Return what landed in these slots, which are free from now on."""
        values: list[int] = self._words[slots.start : slots.stop].tolist()
        self._slots.give_back(slots)
        return tuple(values)


@dataclass(slots=True)
class _ListsInUse:
    """A pair of lists, and how many transfers in flight were made of it."""

    handle: Handle
    num_users: int = 0


class PreparedReads:
    """Descriptor lists of the patterns of one plan: made when a transfer first needs them, kept while one is
    in flight or while they are among the `max_kept` that were used last."""

    def __init__(
        self,
        agent: TransferAgent,
        producers: Sequence[CacheDescription],
        me: CacheDescription,
        max_kept: int,
    ) -> None:
        self._agent = agent
        self._producers = producers
        self._me = me
        self._max_kept = max_kept
        self._kept: OrderedDict[PatternKey, _ListsInUse] = OrderedDict()
        """The one used last comes last."""

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, pattern: Pattern) -> Handle:
        """Take the lists of a pattern, kept until `give_back`. Raises TransferError if the agent refuses
        them."""
        prepared = self._kept.get(pattern.key)
        if prepared is None:
            prepared = self._kept[pattern.key] = _ListsInUse(self._make(pattern))
        prepared.num_users += 1
        self._kept.move_to_end(pattern.key)
        self._shrink()
        return prepared.handle

    def give_back(self, key: PatternKey) -> None:
        """A transfer made of these lists is over."""
        self._kept[key].num_users -= 1
        self._shrink()

    def retire(self) -> None:
        """No transfer begins any more: keep no list for the next one."""
        self._max_kept = 0
        self._shrink()

    def _make(self, pattern: Pattern) -> Handle:
        return _prepare(self._agent, self._producers[pattern.producer_rank], self._me, pattern)

    def _shrink(self) -> None:
        if len(self._kept) <= self._max_kept:
            return
        unused = [key for key, prepared in self._kept.items() if not prepared.num_users]
        for key in unused[: max(0, len(self._kept) - self._max_kept)]:
            self._agent.forget(self._kept.pop(key).handle)


@dataclass(frozen=True, eq=False)
class ProducerLink:
    """One producer engine as one consumer rank sees it."""

    producers: tuple[CacheDescription, ...]
    plan: TransferPlan
    prepared: PreparedReads
    fences: dict[int, Handle]
    """Producer rank -> its generation table, one descriptor per block; ours is the landing memory."""
    num_releases: dict[int, int]
    """Producer rank this rank must release -> how many consumer ranks do."""
    own_views: CanonicalViews
    """The rank's own, of what moves."""
    views: CanonicalViews
    """Where that arrives: those, or the wire cache's."""
    wire: WireCache | None = None
    """Where rows arrive that are converted; None where both engines keep the same format."""
    num_unsent: dict[int, int] = field(default_factory=dict)
    """Producer rank -> messages that it could not be told."""

    @property
    def engine(self) -> str:
        """The producer engine's name."""
        return self.producers[0].engine

    @property
    def epoch(self) -> int:
        """Life of the producer engine."""
        return self.producers[0].epoch

    @property
    def peers(self) -> list[str]:
        """Agent names of the producer ranks that are read from or told."""
        ranks = {*self.plan.producer_ranks, *self.num_releases}
        return [self.producers[rank].agent_name for rank in sorted(ranks)]


def make_link(
    agent: TransferAgent,
    landing: Landing,
    producers: Sequence[CacheDescription],
    consumers: Sequence[CacheDescription],
    me: CacheDescription,
    *,
    views: CanonicalViews,
    wire: WireCache | None = None,
    num_unsent: dict[int, int] | None = None,
    turn: int = 0,
) -> ProducerLink:
    """Add the producer's ranks as peers and prepare the first pattern of each read: all there is where the
    blocks of both engines are alike. Reads go into `wire` where there is one. `views`: the rank's own.
    `num_unsent`: what to count in. `turn`: see `plan_transfer`."""
    geometries = [p.geometry for p in producers]
    out, theirs_kept = left_out(geometries[0], me.geometry), [g.group for g in geometries[0].groups]
    own_views = views.without(out.keys(), theirs_kept)
    if wire is not None:
        me = wire.description
    theirs = wire.consumers if wire else [c.geometry for c in consumers]
    senders = release_senders(geometries, theirs, turn)
    # A wire cache has no room for what is left out, whatever the reason.
    plan = replace(plan_transfer(geometries, me.geometry, turn), left_out=tuple(out.values()))
    num_releases = {rank: len(s) for rank, s in enumerate(senders) if me.geometry.rank in s}
    for rank in sorted({*plan.producer_ranks, *num_releases}):
        agent.add_peer(producers[rank].agent_name, producers[rank].agent_metadata)
    prepared = PreparedReads(agent, producers, me, max_kept=PREPARED_PER_READ * len(plan.reads))
    for key in plan.first_patterns:
        prepared.take(plan.pattern(key))
        prepared.give_back(key)
    fences = {rank: _prepare_fence(agent, landing, producers[rank]) for rank in plan.producer_ranks}
    return ProducerLink(
        tuple(producers),
        plan,
        prepared,
        fences,
        num_releases,
        own_views,
        own_views if wire is None else wire.views.without(out.keys(), theirs_kept),
        wire,
        {} if num_unsent is None else num_unsent,
    )


def pattern_lists(
    producer: CacheDescription, consumer: CacheDescription, pattern: Pattern
) -> tuple[DescriptorList, DescriptorList]:
    """Return a pattern's runs over all blocks, at the producer and at the consumer."""
    runs = pattern.runs
    return (
        DescriptorList(
            producer.base_address + runs.source,
            runs.lengths,
            pattern.source_strides,
            producer.geometry.num_blocks,
        ),
        DescriptorList(
            consumer.base_address + runs.destination,
            runs.lengths,
            pattern.destination_strides,
            consumer.geometry.num_blocks,
        ),
    )


def _prepare(
    agent: TransferAgent, producer: CacheDescription, me: CacheDescription, pattern: Pattern
) -> Handle:
    remote, local = pattern_lists(producer, me, pattern)
    return agent.prepare(producer.agent_name, local, remote, producer.device)


def _prepare_fence(agent: TransferAgent, landing: Landing, producer: CacheDescription) -> Handle:
    size = np.array([GENERATION_BYTES], dtype=np.int64)
    table = np.array([producer.base_address + producer.geometry.generations_offset], dtype=np.int64)
    here = np.array([landing.base_address], dtype=np.int64)
    local = DescriptorList(here, size, size, landing.num_slots)
    remote = DescriptorList(table, size, size, producer.geometry.num_blocks)
    return agent.prepare(producer.agent_name, local, remote, producer.device)
