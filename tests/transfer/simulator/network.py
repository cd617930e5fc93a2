"""The network of a simulated world: agents whose transfers and messages do what networks do to them.

Faults strike here, not in a FaultyAgent around each agent: that one sees calls, and cannot have half of a
transfer's bytes arrive, nor what a dead process has under way.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayk.kv.geometry import GENERATION_BYTES
from rayk.transfer.agent import DescriptorList, Handle, Ints32, Transfer, TransferState, base_address
from rayk.transfer.checked_message import unpack
from rayk.transfer.faulty_agent import POINT_OF_MESSAGE
from tests.transfer.simulator.core import AFTERLIFE, BYTES, REORDER, TRANSPORT, extra_delay
from tests.transfer.simulator.memory import NUM_BLOCKS

if TYPE_CHECKING:
    from tests.transfer.simulator.core import Clock, Engine


class Network:
    """Where the agents of a world find each other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._agents: dict[str, SimulatedAgent] = {}

    def join(self, agent: SimulatedAgent) -> None:
        """Make an agent findable."""
        assert agent.name not in self._agents, f"agent {agent.name} exists"
        self._agents[agent.name] = agent

    def find(self, name: str) -> SimulatedAgent:
        """An agent, whether its process is still there or not."""
        return self._agents[name]

    def send(self, sender: SimulatedAgent, to: SimulatedAgent, message: bytes) -> None:
        """Deliver a message as the network pleases."""
        kind = None
        clock, content = self.clock, unpack(message)
        point = POINT_OF_MESSAGE.get(content[0]) if content else None
        if point is not None:
            kind = clock.strike(point, *in_roles(sender.engine, to.engine))
        if kind == "drop" or not sender.engine.runs:
            return
        delay = clock.latency() + extra_delay(kind)
        if kind == "corrupt":
            spot = clock.random.randrange(len(message))
            message = message[:spot] + bytes([message[spot] ^ 1]) + message[spot + 1 :]
        clock.at(delay, to.deliver, sender.name, message)
        if kind == "duplicate":
            clock.at(delay + clock.latency() + REORDER, to.deliver, sender.name, message)


def in_roles(one: Engine, other: Engine) -> tuple[Engine, Engine]:
    """(producer, consumer) of two engines."""
    return (one, other) if one.role == "prefill" else (other, one)


@dataclass(frozen=True, slots=True)
class _Lists:
    """Prepared descriptor lists."""

    peer: str
    local: DescriptorList
    remote: DescriptorList

    @property
    def is_fence(self) -> bool:
        """Whether generations are read by them."""
        return self.local.lengths.tolist() == [GENERATION_BYTES]


@dataclass(eq=False)
class SimulatedAgent:
    """It belongs to one rank of an engine."""

    name: str
    engine: Engine
    network: Network
    transport: str = "local"
    _regions: dict[int, np.ndarray] = field(default_factory=dict)
    _lists: dict[Handle, _Lists] = field(default_factory=dict)
    _transfers: dict[Transfer, SimulatedTransfer] = field(default_factory=dict)
    _inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.network.join(self)

    @property
    def transport_as_set(self) -> str:
        return self.transport

    def register(self, tensor: torch.Tensor) -> int:
        self._regions[base_address(tensor)] = tensor.numpy().view(np.uint8)
        return base_address(tensor)

    def deregister(self, address: int) -> None:
        self._regions.pop(address, None)

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, name: str, metadata: bytes) -> None:
        assert metadata.decode() == name, "metadata of another agent"

    def remove_peer(self, name: str) -> None:
        self._lists = {handle: lists for handle, lists in self._lists.items() if lists.peer != name}

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        handle = Handle(next(self._ids))
        self._lists[handle] = _Lists(peer, local, remote)
        return handle

    def forget(self, handle: Handle) -> None:
        self._lists.pop(handle, None)

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        return self._post(handle, local_indices, remote_indices)

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        assert notification is not None
        return self._post(handle, local_indices, remote_indices, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        return self._transfers[transfer].state

    def release(self, transfer: Transfer) -> bool:
        is_over = self._transfers[transfer].cancel()
        if is_over:
            del self._transfers[transfer]
        return is_over

    def notify(self, peer: str, message: bytes) -> None:
        self.network.send(self, self.network.find(peer), message)

    def notifications(self) -> list[tuple[str, bytes]]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def close(self) -> None:
        self._regions.clear()

    def deliver(self, sender: str, message: bytes) -> None:
        """A message is here."""
        if self.engine.runs:
            self.engine.clock.log(f"{self.name} hears {message[8:].decode(errors='replace')}")
            self._inbox.append((sender, message))
            self.engine.wake()

    def bytes_at(self, address: int, length: int) -> np.ndarray:
        """Registered memory."""
        for base, region in self._regions.items():
            if base <= address and address + length <= base + len(region):
                return region[address - base : address - base + length]
        raise AssertionError(f"[{address}, {address + length}) is not registered at {self.name}")

    def _post(
        self, handle: Handle, ours: Ints32, theirs: Ints32, notification: bytes | None = None
    ) -> Transfer:
        lists = self._lists[handle]
        transfer = Transfer(next(self._ids))
        posted = SimulatedTransfer(self, self.network.find(lists.peer), lists, notification)
        self._transfers[transfer] = posted
        posted.post(ours, theirs)
        return transfer


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one descriptor moves: (block, address) on both sides."""

    source: tuple[int, int]
    target: tuple[int, int]
    length: int


class SimulatedTransfer:
    """A read or write under way: bytes move in two halves, whenever the network pleases."""

    def __init__(
        self, poster: SimulatedAgent, peer: SimulatedAgent, lists: _Lists, notification: bytes | None
    ) -> None:
        self.state = TransferState.PENDING
        self.is_stalled = False
        self._poster = poster
        self._notification = notification
        is_write = notification is not None
        self._source, self._target = (poster, peer) if is_write else (peer, poster)
        self._lists = (lists.local, lists.remote) if is_write else (lists.remote, lists.local)
        self._clock = poster.engine.clock
        self._points: tuple[str | None, str | None] = ("post", "mid_transfer")
        self._is_fence = lists.is_fence
        if self._is_fence:
            self._points = ("notify", None)
        self._pieces: list[_Piece] = []
        self._holders: dict[int, str | None] = {}
        """Blocks of the target -> whose they are, as the poster knows."""
        self._read_from: dict[int, str | None] = {}
        """The same of blocks that are written from."""
        self._corrupts = self._is_twice = False

    @property
    def _engines(self) -> tuple[Engine, Engine]:
        return self._source.engine, self._target.engine

    def post(self, ours: Ints32, theirs: Ints32) -> None:
        """Start it."""
        kind = self._strike(0)
        if not self._poster.engine.runs:
            return
        for engine in self._engines:
            engine.transfers[self] = None
        from_, to = (ours, theirs) if self._notification is not None else (theirs, ours)
        if kind == "corrupt" and not self._is_fence:
            run, block = np.divmod(from_, NUM_BLOCKS)
            from_ = run * NUM_BLOCKS + block % (NUM_BLOCKS - 1) + 1
        self._corrupts = kind == "corrupt" and self._is_fence
        self._is_twice = kind == "duplicate"
        source, target = self._lists
        lengths = source.lengths[from_ // source.num_blocks].tolist()
        ends = zip(_places(source, from_), _places(target, to), lengths, strict=True)
        self._pieces = [_Piece(*piece) for piece in ends]
        self._note_holders(is_sent_wrong=kind == "corrupt")
        if kind == "drop":
            self.is_stalled = True
            self._clock.at(TRANSPORT, self.end, False)
        else:
            delay = 1 + int(self._clock.random.random() * BYTES) + extra_delay(kind)
            self._clock.at(delay, self._middle)

    def cancel(self) -> bool:
        """Take it back, if the transport can."""
        if self.state is TransferState.PENDING:
            if not self._clock.can_cancel:
                return False
            self._over(TransferState.FAILED)
        return True

    def end(self, is_ok: bool) -> None:
        """Nothing of it moves any more."""
        if self.state is TransferState.PENDING:
            self._over(TransferState.DONE if is_ok else TransferState.FAILED)
            self._poster.engine.wake()

    def _over(self, state: TransferState) -> None:
        self.state = state
        for engine in self._engines:
            engine.transfers.pop(self, None)

    def _note_holders(self, *, is_sent_wrong: bool) -> None:
        if self._is_fence:
            return
        memory = self._target.engine.memory
        for piece in self._pieces:
            block = piece.target[0]
            self._holders[block] = memory.holders[block]
        if self._notification is not None:
            content = unpack(self._notification)
            assert content is not None
            self._holders = dict.fromkeys(self._holders, content[1])  # the reservation is the holder
            if not is_sent_wrong:
                holders = self._source.engine.memory.holders
                self._read_from = {p.source[0]: holders[p.source[0]] for p in self._pieces}

    def _middle(self) -> None:
        if self.state is not TransferState.PENDING or self._is_cut_off():
            return
        kind = self._strike(1)
        half = len(self._pieces) // 2
        self._copy(self._pieces[:half])
        if kind == "drop":
            self.is_stalled = True
            self._clock.at(TRANSPORT, self.end, False)
            return
        self._corrupts |= kind == "corrupt"
        self._is_twice |= kind == "duplicate"
        delay = 1 + int(self._clock.random.random() * BYTES) + extra_delay(kind)
        self._clock.at(delay, self._last, half)

    def _last(self, half: int) -> None:
        if self.state is not TransferState.PENDING or self._is_cut_off():
            return
        self._copy(self._pieces if self._is_twice else self._pieces[half:])
        if self._corrupts:
            # All rows of one block: some of them are live.
            block = self._clock.random.choice(self._pieces).target[0]
            for piece in [piece for piece in self._pieces if piece.target[0] == block]:
                self._target.bytes_at(piece.target[1], piece.length)[:] ^= 1 << 6
        self.end(True)
        if self._notification is not None:
            for _ in range(1 + self._is_twice):
                self._clock.at(
                    self._clock.latency(), self._target.deliver, self._poster.name, self._notification
                )

    def _strike(self, which: int) -> str | None:
        point = self._points[which]
        return self._clock.strike(point, *in_roles(*self._engines)) if point is not None else None

    def _is_cut_off(self) -> bool:
        """Whether a process at an end is gone, or stopped and its bytes with it."""
        source, target = self._engines
        if source.runs and target.runs:
            return False
        if not target.alive:
            self.end(False)
            return True
        if any(not e.alive and self._clock.now - e.died > AFTERLIFE for e in self._engines):
            self.end(False)
            return True
        if any(e.stopped for e in self._engines) and not self._clock.goes_on_when_stopped:
            self.is_stalled = True
            return True
        return False

    def _copy(self, pieces: list[_Piece]) -> None:
        source, target = self._source.engine.memory, self._target.engine.memory
        for piece in pieces:
            if not self._is_fence:
                here, there = piece.source[0], piece.target[0]
                if target.holders[there] != self._holders[there]:
                    self._clock.violate(
                        f"{target.name}: a write for {self._holders[there]} into block {there}, which is "
                        f"{target.holders[there] or 'somebody else'}'s"
                    )
                    return
                if here in self._read_from and source.holders[here] != self._read_from[here]:
                    self._clock.violate(f"{source.name}: block {here} is written from, and was handed out")
            found = self._source.bytes_at(piece.source[1], piece.length)
            self._target.bytes_at(piece.target[1], piece.length)[:] = found


def _places(descriptors: DescriptorList, indices: Ints32) -> list[tuple[int, int]]:
    """(block, address) of descriptors."""
    run, block = np.divmod(indices, descriptors.num_blocks)
    addresses = descriptors.addresses[run] + block * descriptors.strides[run]
    return list(zip(block.tolist(), addresses.tolist(), strict=True))
