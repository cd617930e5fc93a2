"""Reads that go through a registered buffer: whole stretches arrive there and are copied into pages.

A staged read takes its blocks in chunks that fit. A chunk holds its place in the buffer until its bytes are
in the pages, or until nothing writes there any more; it waits for room in turn and holds nothing meanwhile,
so that somebody always gets on. On a GPU the place is given back only when the copy has run there.

What a GPU reads from a host's memory, the host tier's say, is staged in pinned memory of the host, and copied
to the device from there, on a stream of its own: transports between devices do not reach a host's memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch

from rayk.kernels.copy_runs import RunTable, copy_runs, make_run_table
from rayk.kv.caches import empty_bytes
from rayk.transfer.agent import DescriptorList, Handle, Transfer, TransferAgent, TransferState
from rayk.transfer.costs import CostTable, Option, TransferCosts
from rayk.transfer.extents import AREA_ALIGNMENT, Extents, Ints, make_extents
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.options import chunk_blocks, num_merged, read_option
from rayk.transfer.plan import BlockReads, Pattern
from rayk.transfer.stretches import Stretches
from rayk.types.errors import TransferError

TABLES_KEPT = 4
"""Tables of each pattern that are kept: chunks are of one size but for the last."""


class Marker(Protocol):
    """Marks a place in what is queued on a GPU."""

    def query(self) -> bool:
        """Tell whether all before it has run."""
        ...


def is_by_host(device: torch.device, peer_device: str) -> bool:
    """Tell whether a read from the peer's device to this one is one from a host's memory to a GPU."""
    return device.type == "cuda" and torch.device(peer_device).type == "cpu"


def own_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Make a stream; return what makes it current. On a CPU nothing is queued, and that is nothing."""
    if device.type != "cuda":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def mark(device: torch.device) -> Marker | None:
    """Mark the end of what is queued on a GPU's current stream; None on a CPU, where it has run."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class StagingSettings:
    """What a spec says of staging."""

    mode: str = "auto"
    """auto, never or always."""
    num_bytes: int = 64 << 20
    """Size of a rank's buffer."""


class StagingBuffer:
    """Registered memory that is lent in stretches, first come first served."""

    def __init__(
        self, agent: TransferAgent, num_bytes: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        memory = empty_bytes(num_bytes + AREA_ALIGNMENT, device, pinned=pinned)
        skipped = -memory.data_ptr() % AREA_ALIGNMENT
        self.memory = memory[skipped : skipped + num_bytes]
        self.num_bytes = num_bytes
        agent.register(self.memory)
        self._stretches = Stretches(num_bytes, AREA_ALIGNMENT)
        self._waiting: dict[object, None] = {}
        """Who waits, in order of arrival."""

    def take(self, num_bytes: int, who: object) -> range | None:
        """Return a stretch, or None where there is no room or others came first: ask again, or `withdraw`."""
        self._waiting.setdefault(who)
        if next(iter(self._waiting)) is not who:
            return None
        place = self._stretches.take(num_bytes)
        if place is not None:
            del self._waiting[who]
        return place

    def give_back(self, place: range) -> None:
        """Nothing writes there or reads from there any more."""
        self._stretches.give_back(place)

    def withdraw(self, who: object) -> None:
        """Wait no longer."""
        self._waiting.pop(who, None)

    @property
    def num_lent(self) -> int:
        """Stretches in use."""
        return self._stretches.num_lent

    @property
    def num_waiting(self) -> int:
        """Reads that wait for room."""
        return len(self._waiting)


@dataclass(eq=False)
class Staging:
    """One rank's staging: the buffer, and how its reads would be staged."""

    agent: TransferAgent
    settings: StagingSettings
    device: torch.device
    cost_table: CostTable = field(default_factory=CostTable)
    buffer: StagingBuffer | None = field(init=False)
    """None where nothing is ever staged."""
    _device_name: str = field(init=False)
    _extents: weakref.WeakKeyDictionary[Pattern, tuple[Extents, ...]] = field(init=False)
    _tables: weakref.WeakKeyDictionary[Extents, dict[int, RunTable]] = field(init=False)
    """Tables by number of blocks."""

    def __post_init__(self) -> None:
        is_used = self.settings.mode != "never"
        self.buffer = StagingBuffer(self.agent, self.settings.num_bytes, self.device) if is_used else None
        self._device_name = str(self.device)
        self._extents = weakref.WeakKeyDictionary()
        self._tables = weakref.WeakKeyDictionary()

    def buffer_for(self, peer_device: str) -> StagingBuffer | None:
        """Return where reads from a device arrive."""
        return self._host_buffer if self.goes_by_host(peer_device) else self.buffer

    def goes_by_host(self, peer_device: str) -> bool:
        """Tell whether reads from a device are staged in the host's memory, whatever they cost."""
        return self.buffer is not None and is_by_host(self.device, peer_device)

    @cached_property
    def _host_buffer(self) -> StagingBuffer:
        return StagingBuffer(self.agent, self.settings.num_bytes, torch.device("cpu"), pinned=True)

    def copying(self, peer_device: str) -> AbstractContextManager[object]:
        """Return a context in which copies of what came from a device are queued."""
        return self._own_stream() if self.goes_by_host(peer_device) else nullcontext()

    @cached_property
    def _own_stream(self) -> Callable[[], AbstractContextManager[object]]:
        return own_stream(self.device)

    def costs(self, peer_device: str) -> TransferCosts:
        """Return what reads from a device cost, as far as it is known by now."""
        return self.cost_table.of(self.agent.transport, self._device_name, peer_device)

    def told(self, peer_device: str) -> str:
        """Tell where `costs` has it from."""
        return self.cost_table.told(self.agent.transport, self._device_name, peer_device)

    def extents(self, pattern: Pattern, peer_device: str) -> tuple[Extents, ...]:
        """Say how a pattern is staged; nothing where it cannot be. What was said once stays, whatever is
        measured later: it was counted on."""
        found = self._extents.get(pattern)
        if found is None:
            gap_bytes = self.costs(peer_device).gap_bytes
            found = self._extents[pattern] = make_extents(pattern, gap_bytes, self.settings.num_bytes) or ()
        return found

    def table(self, part: Extents, num_blocks: int) -> RunTable:
        """Return the copies of a chunk, from its place in the buffer to block 0 of the pages."""
        tables = self._tables.setdefault(part, {})
        if num_blocks not in tables:
            if len(tables) == TABLES_KEPT:
                del tables[next(iter(tables))]
            areas, _ = part.areas(num_blocks)
            tables[num_blocks] = make_run_table(
                (areas + part.shifts)[part.run_extents] + part.run_offsets,
                part.destinations,
                part.run_lengths,
                part.staged_strides[part.run_extents],
                part.destination_strides,
                self.device,
            )
        return tables[num_blocks]

    def option(self, read: BlockReads, peer_device: str) -> Option:
        """Return what a read from a device costs in either way."""
        parts, costs = self.extents(read.pattern, peer_device), self.costs(peer_device)
        option = read_option(read, parts, costs, self.settings.num_bytes)
        return replace(option, must_stage=self.goes_by_host(peer_device))

    def chunk_blocks(self, part: Extents) -> int:
        """Count the blocks of a chunk: so many that a second one can arrive while the first is copied out."""
        return chunk_blocks(part, self.settings.num_bytes)


@dataclass(eq=False)
class _StagedChunk:
    """Blocks [first, stop) of a read's, one part of each, on their way."""

    part: Extents
    first: int
    stop: int
    place: range
    transfer: Transfer
    handle: Handle
    copied: Marker | None = None
    """Marks the end of a GPU's copy that was queued."""


@dataclass(eq=False)
class StagedRead:
    """One read through the staging buffer, from its first chunk to its last copy."""

    read: BlockReads
    staging: Staging
    producer: CacheDescription
    destination: torch.Tensor
    """The buffer whose pages it fills: int8 [bytes]."""
    clock: Callable[[], int]
    failure: str | None = None
    """Why it ended before its end."""
    post_ns: int = 0
    repack_ns: int = 0
    num_descriptors: int = 0
    num_merged: int = 0
    _todo: deque[tuple[Extents, int, int]] = field(default_factory=deque)
    _chunks: list[_StagedChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_blocks = len(self.read.source_blocks)
        for part in self.staging.extents(self.read.pattern, self.producer.device):
            step = self.staging.chunk_blocks(part)
            self._todo.extend((part, i, min(i + step, num_blocks)) for i in range(0, num_blocks, step))

    def begin(self) -> bool:
        """Ask for what there is room for; whether it is over already, after a `failure`."""
        while self._todo and self._post():
            pass
        return not self._chunks and not self._todo

    def advance(self) -> bool:
        """Copy what arrived, ask for more; whether it is over: all is in the pages, or nothing writes any
        more after a `failure`."""
        while True:
            before = len(self._chunks), len(self._todo)
            self._chunks = [chunk for chunk in self._chunks if not self._settle(chunk)]
            if self.failure is not None:
                self._stop_waiting()
            is_over = self.begin()
            # What is done when it is posted need not wait for another round of the engine's loop.
            if not self._chunks or before == (len(self._chunks), len(self._todo)):
                return is_over

    def cancel(self) -> bool:
        """Read no more; whether nothing is in flight."""
        self.failure = self.failure or "cancelled"
        self._stop_waiting()
        self._chunks = [chunk for chunk in self._chunks if not self._give_up(chunk)]
        return not self._chunks

    def _stop_waiting(self) -> None:
        self._todo.clear()
        assert self._buffer is not None
        self._buffer.withdraw(self)

    @property
    def _buffer(self) -> StagingBuffer:
        buffer = self.staging.buffer_for(self.producer.device)
        assert buffer is not None, "a rank that never stages"
        return buffer

    def _post(self) -> bool:
        """Start the next chunk, if there is room."""
        part, first, stop = self._todo[0]
        areas, num_bytes = part.areas(stop - first)
        place = self._buffer.take(num_bytes, self)
        if place is None:
            return False
        began = self.clock()
        self._todo.popleft()
        agent, blocks = self.staging.agent, self.read.source_blocks[first:stop]
        try:
            handle = self._prepare(part, areas + place.start, stop - first)
        except TransferError as error:
            return self._refuse(error, place)
        index = np.arange(len(part), dtype=np.int64)[:, None]
        here = index * (stop - first) + np.arange(stop - first)[None, :]
        there = index * self.producer.geometry.num_blocks + blocks[None, :]
        try:
            transfer = agent.read(
                handle, here.astype(np.int32).reshape(-1), there.astype(np.int32).reshape(-1)
            )
        except TransferError as error:
            agent.forget(handle)
            return self._refuse(error, place)
        self._chunks.append(_StagedChunk(part, first, stop, place, transfer, handle))
        self.num_descriptors += here.size
        self.num_merged += num_merged(part, blocks)
        self.post_ns += self.clock() - began
        return True

    def _refuse(self, error: TransferError, place: range) -> bool:
        self.failure = error.reason
        self._buffer.give_back(place)
        self._stop_waiting()
        return False

    def _prepare(self, part: Extents, areas: Ints, num_blocks: int) -> Handle:
        """Prepare the lists of one chunk: its areas, and all blocks of the producer. Raises TransferError."""
        base = self._buffer.memory.data_ptr()
        local = DescriptorList(base + areas + part.shifts, part.lengths, part.staged_strides, num_blocks)
        remote = DescriptorList(
            self.producer.base_address + part.starts,
            part.lengths,
            part.strides,
            self.producer.geometry.num_blocks,
        )
        agent, producer = self.staging.agent, self.producer
        return agent.prepare(producer.agent_name, local, remote, producer.device)

    def _settle(self, chunk: _StagedChunk) -> bool:
        """Take note of what has happened to a chunk; whether it is over."""
        if chunk.copied is None:
            state = self.staging.agent.poll(chunk.transfer)
            if state is TransferState.PENDING:
                return False
            self._forget(chunk)
            if state is TransferState.FAILED and self.failure is None:
                self.failure = f"read from producer rank {self.read.producer_rank} failed"
            if self.failure is None:
                self._repack(chunk)
        if chunk.copied is not None and not chunk.copied.query():
            return False
        self._buffer.give_back(chunk.place)
        return True

    def _give_up(self, chunk: _StagedChunk) -> bool:
        """Tell whether a chunk is cancelled, or over anyway."""
        if chunk.copied is not None:
            return self._settle(chunk)
        if not self.staging.agent.release(chunk.transfer):
            return False
        self.staging.agent.forget(chunk.handle)
        self._buffer.give_back(chunk.place)
        return True

    def _forget(self, chunk: _StagedChunk) -> None:
        self.staging.agent.release(chunk.transfer)
        self.staging.agent.forget(chunk.handle)

    def _repack(self, chunk: _StagedChunk) -> None:
        """Copy a chunk into the pages."""
        began = self.clock()
        num_blocks = chunk.stop - chunk.first
        arrived = self._buffer.memory[chunk.place.start : chunk.place.stop]
        to_blocks = self.read.destination_blocks[chunk.first : chunk.stop]
        with self.staging.copying(self.producer.device):
            table = self.staging.table(chunk.part, num_blocks)
            there = arrived.to(self.destination.device, non_blocking=True)
            copy_runs(there, self.destination, table, np.arange(num_blocks), to_blocks)
            chunk.copied = mark(self.destination.device)
        self.repack_ns += self.clock() - began
