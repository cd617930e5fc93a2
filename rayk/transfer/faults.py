"""Planted errors, for tests and for the faults of an experiment. Nothing here runs unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayk.kv.caches import CanonicalKVCaches
from rayk.transfer.agent import DescriptorList, Handle, Ints32, Transfer, TransferAgent, TransferState


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Flip one bit of what a read brought, as a bad link would."""

    read: int = 0
    """Which data read of the agent, counted from when the fault was planted."""
    descriptor: int = 0
    """Which descriptor of that read."""
    byte: int = 0
    bit: int = 0


@dataclass(frozen=True, slots=True)
class StallReads:
    """From this data read on, nothing ever completes."""

    read: int = 0


Fault = FlipBit | StallReads


class FaultyAgent:
    """Any agent, with faults in the data reads. Reads into memory registered later than the first buffer
    (generations) pass untouched."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._pages: torch.Tensor | None = None
        self._lists: dict[Handle, DescriptorList] = {}
        self._faults: list[Fault] = []
        self._num_reads = 0
        self._data_reads: dict[Transfer, tuple[int, DescriptorList, Ints32]] = {}

    def plant(self, fault: Fault) -> None:
        """The fault strikes from now on; a bit flips once. Reads are counted from here."""
        self._num_reads = 0
        self._faults.append(fault)

    def heal(self) -> None:
        """Forget all faults; stalled reads go on."""
        self._faults.clear()

    @property
    def name(self) -> str:
        """See TransferAgent."""
        return self._agent.name

    @property
    def transport(self) -> str:
        """See TransferAgent."""
        return self._agent.transport

    def register(self, tensor: torch.Tensor) -> int:
        """See TransferAgent."""
        if self._pages is None:
            self._pages = tensor
        return self._agent.register(tensor)

    def metadata(self) -> bytes:
        """See TransferAgent."""
        return self._agent.metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See TransferAgent."""
        self._agent.add_peer(name, metadata)

    def remove_peer(self, name: str) -> None:
        """See TransferAgent."""
        self._agent.remove_peer(name)

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        """See TransferAgent."""
        handle = self._agent.prepare(peer, local, remote, remote_device)
        self._lists[handle] = local
        return handle

    def forget(self, handle: Handle) -> None:
        """See TransferAgent."""
        del self._lists[handle]
        self._agent.forget(handle)

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        """See TransferAgent."""
        transfer = self._agent.read(handle, local_indices, remote_indices)
        local = self._lists[handle]
        if self._offset(int(local.addresses[0])) is not None:
            self._data_reads[transfer] = (self._num_reads, local, local_indices)
            self._num_reads += 1
        return transfer

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        """See TransferAgent."""
        return self._agent.write(handle, local_indices, remote_indices, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        """See TransferAgent."""
        number = self._data_reads[transfer][0] if transfer in self._data_reads else None
        if number is not None and any(isinstance(f, StallReads) and f.read <= number for f in self._faults):
            return TransferState.PENDING
        state = self._agent.poll(transfer)
        if state is TransferState.DONE and number is not None:
            for fault in [f for f in self._faults if isinstance(f, FlipBit) and f.read == number]:
                self._flip(fault, *self._data_reads[transfer][1:])
                self._faults.remove(fault)
        return state

    def release(self, transfer: Transfer) -> bool:
        """See TransferAgent."""
        stalled = transfer in self._data_reads and self.poll(transfer) is TransferState.PENDING
        if stalled and any(isinstance(f, StallReads) for f in self._faults):
            return False
        self._data_reads.pop(transfer, None)
        return self._agent.release(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """See TransferAgent."""
        self._agent.notify(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See TransferAgent."""
        return self._agent.notifications()

    def close(self) -> None:
        """See TransferAgent."""
        self._agent.close()

    def _flip(self, fault: FlipBit, local: DescriptorList, indices: Ints32) -> None:
        run, block = divmod(int(indices[fault.descriptor]), local.num_blocks)
        offset = self._offset(int(local.addresses[run]) + block * int(local.strides[run]) + fault.byte)
        assert offset is not None
        assert self._pages is not None
        assert fault.byte < int(local.lengths[run]), "the byte lies in the descriptor"
        self._pages.view(torch.uint8)[offset] ^= 1 << fault.bit

    def _offset(self, address: int) -> int | None:
        """Where an address lies in the pages, or None."""
        assert self._pages is not None, "register the cache first"
        offset = address - self._pages.data_ptr()
        return offset if 0 <= offset < self._pages.numel() else None


def reuse_early(caches: CanonicalKVCaches, block_ids: Sequence[int], fill: int = 0x11) -> None:
    """A producer rank hands leased blocks out again: generations first, then other content in every layer."""
    ids = torch.tensor(sorted(set(block_ids)), dtype=torch.int64, device=caches.buffer.device)
    caches.generations[ids] += 1
    for group in caches.geometry.groups:
        ratio = group.kernel_blocks_per_block
        kernel_ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).reshape(-1)
        for layer in group.group.layers:
            bound = caches.view(layer, group.group.spec.part)
            for view in (bound,) if isinstance(bound, torch.Tensor) else tuple(bound.values()):
                _fill(view, kernel_ids, fill)


def _fill(view: torch.Tensor, block_ids: torch.Tensor, fill: int) -> None:
    """Write a byte all over some blocks: it means something else in every dtype."""
    junk = torch.full(view[block_ids].shape, fill, dtype=torch.int8, device=view.device)
    junk = junk.repeat_interleave(view.element_size(), dim=-1).contiguous()
    view[block_ids] = junk.view(view.dtype)
