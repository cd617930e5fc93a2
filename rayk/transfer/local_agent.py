"""An agent that copies within one process: tests, and engines that share a process (CPU or GPU).

Transfers finish `delay_polls` polls after they were posted and copy only then, so that whatever happens to
the source in between is seen, as with a real transport.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from rayk.transfer.agent import DescriptorList, Handle, Ints32, Transfer, TransferState, base_address
from rayk.types.errors import TransferError


class LocalNetwork:
    """Lets local agents find each other. Threads may share it."""

    def __init__(self) -> None:
        self._agents: dict[str, LocalAgent] = {}
        self._lock = threading.Lock()

    def join(self, agent: LocalAgent) -> None:
        """Make an agent findable. AssertionError if the name is taken."""
        with self._lock:
            assert agent.name not in self._agents, f"agent {agent.name} exists"
            self._agents[agent.name] = agent

    def leave(self, name: str) -> None:
        """The agent is gone, as if its process had died."""
        with self._lock:
            self._agents.pop(name, None)

    def find(self, name: str) -> LocalAgent:
        """Raises TransferError when the agent is gone."""
        agent = self._agents.get(name)
        if agent is None:
            raise TransferError("", f"peer {name} is gone")
        return agent


@dataclass(eq=False)
class _CopyLists:
    peer: str
    local: DescriptorList
    remote: DescriptorList


@dataclass(eq=False)
class _PendingCopy:
    prepared: _CopyLists
    local_indices: Ints32
    remote_indices: Ints32
    polls_left: int
    is_write: bool = False
    notification: bytes | None = None
    state: TransferState = TransferState.PENDING


@dataclass(eq=False)
class LocalAgent:
    name: str
    network: LocalNetwork
    delay_polls: int = 0
    transport: str = "local"
    _regions: list[torch.Tensor] = field(default_factory=list)
    _peers: set[str] = field(default_factory=set)
    _handles: dict[Handle, _CopyLists] = field(default_factory=dict)
    _in_flight: dict[Transfer, _PendingCopy] = field(default_factory=dict)
    _inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.network.join(self)

    @property
    def transport_as_set(self) -> str:
        """There is nothing to set."""
        return self.transport

    def register(self, tensor: torch.Tensor) -> int:
        self._regions.append(tensor)
        return base_address(tensor)

    def deregister(self, address: int) -> None:
        self._regions = [region for region in self._regions if region.data_ptr() != address]

    def metadata(self) -> bytes:
        """The name is all a peer needs."""
        return self.name.encode()

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Raises TransferError when nobody has that name."""
        assert metadata.decode() == name, "metadata of another agent"
        self.network.find(name)
        self._peers.add(name)

    def remove_peer(self, name: str) -> None:
        self._peers.discard(name)
        self._handles = {h: p for h, p in self._handles.items() if p.peer != name}

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        assert peer in self._peers, f"{peer} was not added"
        assert np.array_equal(local.lengths, remote.lengths), "lists of unlike runs"
        handle = Handle(next(self._ids))
        self._handles[handle] = _CopyLists(peer, local, remote)
        return handle

    def forget(self, handle: Handle) -> None:
        prepared = self._handles.pop(handle, None)
        in_flight = [r.prepared for r in self._in_flight.values() if r.state is TransferState.PENDING]
        assert prepared is None or prepared not in in_flight, "a transfer in flight was made of these lists"

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        return self._post(
            _PendingCopy(self._handles[handle], local_indices, remote_indices, self.delay_polls)
        )

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        prepared, delay = self._handles[handle], self.delay_polls
        return self._post(_PendingCopy(prepared, local_indices, remote_indices, delay, True, notification))

    def poll(self, transfer: Transfer) -> TransferState:
        pending = self._in_flight[transfer]
        if pending.state is TransferState.PENDING:
            if pending.polls_left > 0:
                pending.polls_left -= 1
            else:
                pending.state = self._copy(pending)
        return pending.state

    def release(self, transfer: Transfer) -> bool:
        """A copy happens inside `poll`, so a pending read can always be cancelled."""
        self._in_flight.pop(transfer, None)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        self.network.find(peer)._inbox.append((self.name, message))

    def notifications(self) -> list[tuple[str, bytes]]:
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def close(self) -> None:
        self.network.leave(self.name)
        self._regions.clear()
        self._handles.clear()
        self._in_flight.clear()

    def _post(self, pending: _PendingCopy) -> Transfer:
        assert len(pending.local_indices) == len(pending.remote_indices)
        self.network.find(pending.prepared.peer)
        transfer = Transfer(next(self._ids))
        self._in_flight[transfer] = pending
        return transfer

    def _copy(self, pending: _PendingCopy) -> TransferState:
        try:
            peer = self.network.find(pending.prepared.peer)
        except TransferError:
            return TransferState.FAILED
        local, remote = pending.prepared.local, pending.prepared.remote
        local_runs, local_blocks = np.divmod(pending.local_indices, local.num_blocks)
        remote_runs, remote_blocks = np.divmod(pending.remote_indices, remote.num_blocks)
        assert np.array_equal(local_runs, remote_runs), "a transfer pairs a run with itself"
        for run in np.unique(local_runs):
            here = local_runs == run
            ours = _run_view(self._regions, local, int(run)), torch.from_numpy(local_blocks[here]).long()
            theirs = _run_view(peer._regions, remote, int(run)), torch.from_numpy(remote_blocks[here]).long()
            (source, from_blocks), (to, to_blocks) = (ours, theirs) if pending.is_write else (theirs, ours)
            to[to_blocks] = source[from_blocks].to(to.device)
        if pending.notification is not None:
            peer._inbox.append((self.name, pending.notification))
        return TransferState.DONE


def _run_view(regions: list[torch.Tensor], descriptors: DescriptorList, run: int) -> torch.Tensor:
    """int8 [num_blocks, length] of one run over all blocks. AssertionError outside registered memory."""
    address, length = int(descriptors.addresses[run]), int(descriptors.lengths[run])
    stride = int(descriptors.strides[run])
    extent = (descriptors.num_blocks - 1) * stride + length
    for region in regions:
        offset = address - region.data_ptr()
        if offset >= 0 and offset + extent <= region.numel():
            shape = (descriptors.num_blocks, length)
            return torch.as_strided(region, shape, (stride, 1), offset)
    raise AssertionError(f"[{address}, {address + extent}) is not registered")
