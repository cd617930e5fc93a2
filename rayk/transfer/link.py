"""What a consumer rank keeps ready for one producer engine: plan, descriptor lists, whom to release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.kv.block_pool import BlockPool
from rayk.kv.geometry import GENERATION_BYTES
from rayk.transfer.agent import DescriptorList, Handle, TransferAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.plan import Pattern, PatternKey, TransferPlan, plan_transfer, release_senders
from rayk.types.errors import OutOfBlocks


class Landing:
    """Registered memory where generations read from peers land, in slots of 8 bytes."""

    def __init__(self, agent: TransferAgent, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._buffer = torch.full((num_slots * GENERATION_BYTES,), -1, dtype=torch.int8, device=device)
        self.base_address = agent.register(self._buffer)
        self._slots = BlockPool(num_slots)

    def take(self, num_slots: int) -> list[int] | None:
        """Slots filled with -1 (no generation), consecutive if possible; None if there are too few."""
        try:
            slots = self._slots.allocate(num_slots)
        except OutOfBlocks:
            return None
        self._words[slots] = -1
        if self._buffer.is_cuda:
            # A peer's bytes may land before a queued kernel runs, which would then wipe them out.
            torch.cuda.current_stream(self._buffer.device).synchronize()
        return slots

    def give_back(self, slots: Sequence[int]) -> tuple[int, ...]:
        """What landed in these slots, which are free from now on."""
        values: list[int] = self._words[list(slots)].tolist()
        self._slots.free(slots)
        return tuple(values)

    @property
    def _words(self) -> torch.Tensor:
        return self._buffer.view(torch.int64)


@dataclass(frozen=True, eq=False)
class ProducerLink:
    """One producer engine as one consumer rank sees it."""

    producers: tuple[CacheDescription, ...]
    plan: TransferPlan
    handles: dict[PatternKey, Handle]
    """Prepared lists."""
    fences: dict[int, Handle]
    """Producer rank -> its generation table, one descriptor per block; ours is the landing memory."""
    num_releases: dict[int, int]
    """Producer rank this rank must release -> how many consumer ranks do."""

    @property
    def engine(self) -> str:
        """The producer engine's name."""
        return self.producers[0].engine

    @property
    def epoch(self) -> int:
        """Its life."""
        return self.producers[0].epoch


def make_link(
    agent: TransferAgent,
    landing: Landing,
    producers: Sequence[CacheDescription],
    consumers: Sequence[CacheDescription],
    me: CacheDescription,
) -> ProducerLink:
    """Add the producer's ranks as peers and prepare every pattern of the plan."""
    geometries = [p.geometry for p in producers]
    senders = release_senders(geometries, [c.geometry for c in consumers])
    plan = plan_transfer(geometries, me.geometry)
    num_releases = {rank: len(s) for rank, s in enumerate(senders) if me.tp_rank in s}
    for rank in sorted({*plan.producer_ranks, *num_releases}):
        agent.add_peer(producers[rank].agent_name, producers[rank].agent_metadata)
    handles = {
        pattern.key: _prepare(agent, producers[pattern.producer_rank], me, pattern)
        for pattern in plan.patterns.values()
    }
    fences = {rank: _prepare_fence(agent, landing, producers[rank]) for rank in plan.producer_ranks}
    return ProducerLink(tuple(producers), plan, handles, fences, num_releases)


def _prepare(
    agent: TransferAgent, producer: CacheDescription, me: CacheDescription, pattern: Pattern
) -> Handle:
    runs = pattern.runs
    local = DescriptorList(
        me.base_address + runs.destination,
        runs.lengths,
        pattern.destination_strides,
        me.geometry.num_blocks,
    )
    remote = DescriptorList(
        producer.base_address + runs.source,
        runs.lengths,
        pattern.source_strides,
        producer.geometry.num_blocks,
    )
    return agent.prepare(producer.agent_name, local, remote, producer.device)


def _prepare_fence(agent: TransferAgent, landing: Landing, producer: CacheDescription) -> Handle:
    size = np.array([GENERATION_BYTES], dtype=np.int64)
    table = np.array([producer.base_address + producer.geometry.generations_offset], dtype=np.int64)
    here = np.array([landing.base_address], dtype=np.int64)
    local = DescriptorList(here, size, size, landing.num_slots)
    remote = DescriptorList(table, size, size, producer.geometry.num_blocks)
    return agent.prepare(producer.agent_name, local, remote, producer.device)
