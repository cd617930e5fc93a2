"""What rayk asks of whoever moves the bytes. NIXL's words: agent, registration, descriptor, notification.

Semantics every agent keeps: a read copies from a peer's registered memory into this agent's, a write the
other way round; transfers are not ordered among each other; a read that is DONE is visible to whoever polls
it, and a write to whoever got its notification. Notifications arrive at least once, in any order. An agent is
driven by one thread and makes progress only when it is polled.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints32 = npt.NDArray[np.int32]
Handle = NewType("Handle", int)
"""A pair of prepared descriptor lists, ours and a peer's."""
Transfer = NewType("Transfer", int)
"""A read or a write in flight."""


@dataclass(frozen=True, eq=False)
class DescriptorList:
    """Runs repeated over blocks: run i covers [addresses[i] + b * strides[i], ... + lengths[i]) for every
    block b < num_blocks. Descriptor index = i * num_blocks + b. Bytes; addresses absolute."""

    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    num_blocks: int

    def strided(self, device_index: int) -> npt.NDArray[np.uint64]:
        """uint64 [runs, 5] of (address, length, device, stride, count)."""
        rows = np.empty((len(self.addresses), 5), dtype=np.uint64)
        rows[:, 0] = self.addresses
        rows[:, 1] = self.lengths
        rows[:, 2] = device_index
        rows[:, 3] = self.strides
        rows[:, 4] = self.num_blocks
        return rows


@enum.unique
class TransferState(enum.Enum):
    """Says where a transfer stands."""

    PENDING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class TransferAgent(Protocol):
    """Moves bytes between registered buffers. Addresses are those of this process or of the peer's."""

    @property
    def name(self) -> str:
        """Unique among all agents that may meet."""
        ...

    @property
    def transport(self) -> str:
        """What carries the bytes, as handshakes compare it: local, nixl/UCX, ..."""
        ...

    @property
    def transport_as_set(self) -> str:
        """Tell reports the transport with the settings that decide how it moves this agent's memory."""
        ...

    def register(self, tensor: torch.Tensor) -> int:
        """Make a dense int8 tensor readable and writable; its base address. Call before `metadata`."""
        ...

    def deregister(self, address: int) -> None:
        """Nobody reads or writes the tensor that was registered at this address any more. Nothing where it is
        not, or no longer, registered."""
        ...

    def metadata(self) -> bytes:
        """Return what a peer needs for `add_peer`."""
        ...

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Get ready to read from, write to and notify a peer. Adding one twice is harmless."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer and every handle prepared with it, when the last transfer with it has ended: nobody
        waits for that, and nobody begins a new one. Whoever holds one polls it on: its memory may still be
        written to."""
        ...

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        """Prepare descriptor lists for many transfers. `remote_device` is the peer's torch device."""
        ...

    def forget(self, handle: Handle) -> None:
        """Free prepared lists that no transfer in flight was made of; a removed peer's are gone already."""
        ...

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        """Start copying remote descriptor remote_indices[i] into local descriptor local_indices[i].

        Raises TransferError when it cannot be posted.
        """
        ...

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        """Start copying local descriptor local_indices[i] into remote descriptor remote_indices[i].

        The peer gets `notification` when all bytes are visible to it. Raises TransferError when it cannot be
        posted; nothing is written then, and nobody notified.
        """
        ...

    def poll(self, transfer: Transfer) -> TransferState:
        """Make progress and say where a transfer stands."""
        ...

    def release(self, transfer: Transfer) -> bool:
        """Forget a transfer; one in flight is cancelled. False (and nothing changed) when that is
        impossible."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message. Raises TransferError when the peer is known to be gone."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """List messages that arrived since the last call, as (peer, message); also makes progress."""
        ...

    def close(self) -> None:
        """Deregister and forget everything."""
        ...


def base_address(tensor: torch.Tensor) -> int:
    """Tell where a dense int8 tensor starts. AssertionError for anything else."""
    assert tensor.dtype == torch.int8, "agents register int8 buffers"
    assert tensor.is_contiguous(), "agents register dense buffers"
    return int(tensor.data_ptr())


AgentFacts = dict[str, Any]
"""What `measure` found: transport, gb_per_s, latency_us, or error."""
