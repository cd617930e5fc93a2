"""Bare NIXL beside rayk: the same descriptors, prepared beforehand as one list per pair of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rayk.transfer.agent import DescriptorList, Handle, TransferAgent, TransferState
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.plan import BlockReads
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import TransferError


@dataclass
class Clock:
    """What all times are taken by."""

    is_wall: bool = False

    def now_ns(self) -> int:
        """Time of the wall, or of this process."""
        return time.monotonic_ns() if self.is_wall else time.process_time_ns()


@dataclass
class RawReads:
    """Reads that are posted and waited for one after the other, as one process must."""

    reads: list[tuple[TransferAgent, Handle]] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Bytes of each descriptor, by read."""

    def add(
        self,
        agent: TransferAgent,
        peer: CacheDescription,
        local: npt.NDArray[np.int64],
        remote: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        ours, theirs = (DescriptorList(addresses, lengths, lengths, 1) for addresses in (local, remote))
        self.reads.append((agent, agent.prepare(peer.agent_name, ours, theirs)))
        self.lengths.append(lengths)

    @property
    def num_bytes(self) -> int:
        return int(sum(part.sum() for part in self.lengths))

    @property
    def num_descriptors(self) -> int:
        return sum(map(len, self.lengths))

    @property
    def run_bytes(self) -> int:
        return int(np.median(np.concatenate(self.lengths)))

    def time_s(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> float:
        """What they take. Raises TransferError."""
        began = clock_ns()
        for (agent, handle), lengths in zip(self.reads, self.lengths, strict=True):
            indices = np.arange(len(lengths), dtype=np.int32)
            transfer = agent.read(handle, indices, indices)
            while (state := agent.poll(transfer)) is TransferState.PENDING:
                agent.notifications()
            agent.release(transfer)
            if state is not TransferState.DONE:
                raise TransferError("", "a bare read failed")
        return (clock_ns() - began) / 1e9


def same_descriptors(
    sides: Sequence[tuple[TransferAgent, TransferRank]],
    producers: Sequence[CacheDescription],
    ticket: TransferTicket,
    tables: Sequence[Sequence[int]],
) -> RawReads:
    """What these consumer ranks read for a request, in rayk's own descriptors."""
    raw = RawReads()
    for agent, rank in sides:
        by_peer: dict[int, list[BlockReads]] = {}
        for read in rank.plan(ticket.engine).lower(ticket.num_tokens, ticket.block_tables, tables):
            by_peer.setdefault(read.producer_rank, []).append(read)
        for producer, reads in by_peer.items():
            peer = producers[producer]
            offsets = [np.concatenate(side) for side in zip(*(r.offsets() for r in reads), strict=True)]
            sizes = [np.repeat(r.pattern.runs.lengths, len(r.source_blocks)) for r in reads]
            here, there = rank.description.base_address + offsets[1], peer.base_address + offsets[0]
            raw.add(agent, peer, here, there, np.concatenate(sizes))
    return raw


def take_turns(
    first: Callable[[], object], second: Callable[[], object], before: Callable[[], object], rounds: int
) -> None:
    """Run two things in turns, another one first each round, and `before` in front of each, so that both find
    the processor's caches alike."""
    for i in range(rounds):
        for step in (first, second) if i % 2 == 0 else (second, first):
            before()
            step()
