"""An agent with planted faults, for tests and for the faults of an experiment."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.geometry import GENERATION_BYTES
from rayk.transfer.agent import DescriptorList, Handle, Ints32, Transfer, TransferAgent, TransferState
from rayk.transfer.checked_message import unpack
from rayk.transfer.faults import FLIP_BIT, READ, FaultyTransfer, PlantedFaults, StrikeMessage, TransferFault
from rayk.types.errors import TransferError


@dataclass(frozen=True, slots=True)
class _Mail:
    """A message that leaves later."""

    peer: str
    message: bytes
    due_s: float
    is_reordered: bool


class FaultyAgent:
    """Any agent, with faults planted in what it reads, writes and tells.

    Reads of generations are told from data by their descriptors' length. `on_strike`: what a rank does that
    is to die or to stop, given the kind.
    """

    def __init__(
        self,
        agent: TransferAgent,
        on_strike: Callable[[str], None] = lambda kind: None,
        engine: str = "",
    ) -> None:
        """`engine`: whose rank it is."""
        self._agent = agent
        self._on_strike = on_strike
        self._engine = engine
        self._regions: list[torch.Tensor] = []
        self._lists: dict[Handle, tuple[DescriptorList, DescriptorList]] = {}
        """Ours and the peer's."""
        self._faults = PlantedFaults()
        self._own: list[TransferFault] = []
        """Faults of this rank that a peer's message sets off."""
        self._faulty: dict[Transfer, FaultyTransfer] = {}
        self._faulty_ids = itertools.count(-2, -1)
        self._flips: dict[Transfer, tuple[TransferFault, DescriptorList, Ints32]] = {}
        """Reads that bring a wrong bit."""
        self._mail: list[_Mail] = []
        self._peers: list[str] = []
        self._is_wiring = False

    def plant(self, fault: TransferFault) -> None:
        """The fault strikes from now on. What passes its point is counted from here."""
        if fault.is_of_rank and fault.remote == self._engine:
            self._own.append(fault)
        else:
            self._faults.plant(fault)

    def heal(self) -> None:
        """Forget all faults; stalled reads go on."""
        self._faults.clear()
        self._flips.clear()
        for faulty in self._faulty.values():
            faulty.is_stalled = False

    @contextlib.contextmanager
    def wiring(self) -> Iterator[None]:
        """Meanwhile, reads belong to the handshake."""
        self._is_wiring = True
        try:
            yield
        finally:
            self._is_wiring = False

    @property
    def name(self) -> str:
        return self._agent.name

    @property
    def transport(self) -> str:
        return self._agent.transport

    @property
    def transport_as_set(self) -> str:
        return self._agent.transport_as_set

    def register(self, tensor: torch.Tensor) -> int:
        self._regions.append(tensor)
        return self._agent.register(tensor)

    def deregister(self, address: int) -> None:
        self._regions = [region for region in self._regions if region.data_ptr() != address]
        self._agent.deregister(address)

    def metadata(self) -> bytes:
        return self._agent.metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        self._agent.add_peer(name, metadata)
        self._peers = [*(p for p in self._peers if p != name), name]

    def remove_peer(self, name: str) -> None:
        self._peers = [p for p in self._peers if p != name]
        self._agent.remove_peer(name)

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        handle = self._agent.prepare(peer, local, remote, remote_device)
        self._lists[handle] = (local, remote)
        return handle

    def forget(self, handle: Handle) -> None:
        del self._lists[handle]
        self._agent.forget(handle)

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        local, remote = self._lists[handle]
        fault = self.passes(*self._points(is_data=local.lengths.tolist() != [GENERATION_BYTES]))
        if fault is not None and fault.kind == "corrupt" and fault.point == "post":
            remote_indices = _of_next_block(remote_indices, remote.num_blocks)
        transfer = self._start(fault, lambda: self._agent.read(handle, local_indices, remote_indices))
        if fault is not None and fault.flips_bit:
            self._flips[transfer] = fault, local, local_indices
        return transfer

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        local, _ = self._lists[handle]
        fault = self.passes("post", "mid_transfer")
        if fault is not None and fault.kind == "corrupt":
            # A write's bytes are out of reach once they are under way: other pages' are sent.
            local_indices = _of_next_block(local_indices, local.num_blocks)
        write = functools.partial(self._agent.write, handle, local_indices, remote_indices, notification)
        return self._start(fault, write)

    def poll(self, transfer: Transfer) -> TransferState:
        faulty = self._faulty.get(transfer)
        state = faulty.poll() if faulty is not None else self._agent.poll(transfer)
        if state is TransferState.DONE and transfer in self._flips:
            self._flip(*self._flips.pop(transfer))
        return state

    def release(self, transfer: Transfer) -> bool:
        faulty = self._faulty.get(transfer)
        is_over = self._agent.release(transfer) if faulty is None else faulty.release()
        if is_over or faulty is None:
            self._faulty.pop(transfer, None)
            self._flips.pop(transfer, None)
        return is_over

    def notify(self, peer: str, message: bytes) -> None:
        fault = self.passes(_point_of(message)) if _point_of(message) else None
        if fault is None:
            self._agent.notify(peer, message)
            for mail in [m for m in self._mail if m.is_reordered]:
                self._mail.remove(mail)
                self._agent.notify(mail.peer, mail.message)
        elif fault.kind in ("delay", "reorder") or fault.is_of_rank:
            due_s = time.monotonic() + fault.hold_s
            self._mail.append(_Mail(peer, message, due_s, fault.kind == "reorder"))
        elif fault.kind == "duplicate":
            for _ in range(2):
                self._agent.notify(peer, message)
        elif fault.kind == "corrupt":
            self._agent.notify(peer, b"#" + message[1:])

    def notifications(self) -> list[tuple[str, bytes]]:
        for mail in [m for m in self._mail if m.due_s <= time.monotonic()]:
            self._mail.remove(mail)
            with contextlib.suppress(TransferError):  # it may be gone by now
                self._agent.notify(mail.peer, mail.message)
        found = []
        for peer, message in self._agent.notifications():
            if StrikeMessage.decode(message) is None:
                found.append((peer, message))
            elif self._own:
                self._on_strike(self._own.pop().kind)
        return found

    def close(self) -> None:
        self._agent.close()

    def _points(self, *, is_data: bool) -> tuple[str, ...]:
        if self._is_wiring:
            return ("handshake",)
        return ("post", "mid_transfer", READ) if is_data else ("notify",)

    @property
    def num_faults_hit(self) -> Counter[tuple[str, str]]:
        """Faults that have hit here, by kind and point."""
        return self._faults.num_faults_hit

    def passes(self, *points: str) -> TransferFault | None:
        """Return the fault at what passes now; a rank that is to die does so here, or is told to."""
        fault = self._faults.take(*points)
        if fault is not None and fault.is_of_rank:
            if fault.remote is None:
                self._on_strike(fault.kind)
            for peer in self._peers:
                with contextlib.suppress(TransferError):
                    self._agent.notify(peer, StrikeMessage(fault.remote or "").encode())
        return fault

    def _start(self, fault: TransferFault | None, post: Callable[[], Transfer]) -> Transfer:
        for faulty in self._faulty.values():
            faulty.is_overtaken |= faulty.fault.kind == "reorder"
        if fault is None or fault.kind in ("corrupt", FLIP_BIT):
            return post()
        transfer = Transfer(next(self._faulty_ids))
        self._faulty[transfer] = FaultyTransfer(fault, post, self._agent.poll, self._agent.release)
        return transfer

    def _flip(self, fault: TransferFault, local: DescriptorList, indices: Ints32) -> None:
        run, block = divmod(int(indices[fault.descriptor]), local.num_blocks)
        assert fault.byte < int(local.lengths[run]), "the byte lies in the descriptor"
        address = int(local.addresses[run]) + block * int(local.strides[run]) + fault.byte
        region = next(r for r in self._regions if 0 <= address - r.data_ptr() < r.numel())
        region.view(torch.uint8)[address - region.data_ptr()] ^= 1 << fault.bit


def _of_next_block(indices: Ints32, num_blocks: int) -> Ints32:
    """List descriptors of the same runs, in other blocks."""
    run, block = np.divmod(indices, num_blocks)
    moved: Ints32 = (run * num_blocks + (block + 1) % num_blocks).astype(np.int32)
    return moved


POINT_OF_MESSAGE = {"release": "free", "renew": "lease_renewal", "arrived": "notify"}


def _point_of(message: bytes) -> str:
    """Return the point that a message belongs to; empty for any other."""
    content = unpack(message)
    kind = content[0] if isinstance(content, list) and content else None
    return POINT_OF_MESSAGE.get(kind, "") if isinstance(kind, str) else ""


def reuse_early(caches: CanonicalKVCaches, block_ids: Sequence[int], fill: int = 0x11) -> None:
    """Hand leased blocks of a producer rank out again: first generations, then other content everywhere."""
    ids = torch.tensor(sorted(set(block_ids)), dtype=torch.int64, device=caches.buffer.device)
    caches.generations[ids] += 1
    for group in caches.geometry.groups:
        ratio = group.kernel_blocks_per_block
        kernel_ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).reshape(-1)
        for layer in group.layers:
            bound = caches.view(layer, group.group.spec.part)
            for view in (bound,) if isinstance(bound, torch.Tensor) else tuple(bound.values()):
                _fill(view, kernel_ids, fill)


def _fill(view: torch.Tensor, block_ids: torch.Tensor, fill: int) -> None:
    """Write a byte all over some blocks: it means something else in every dtype."""
    junk = torch.full(view[block_ids].shape, fill, dtype=torch.int8, device=view.device)
    junk = junk.repeat_interleave(view.element_size(), dim=-1).contiguous()
    view[block_ids] = junk.view(view.dtype)
