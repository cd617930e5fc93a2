"""Planted errors, for tests and for the faults of an experiment. Nothing here runs unless asked for."""

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
from rayk.transfer.strikes import Strike, StrikeMessage, Strikes, StruckTransfer
from rayk.types.errors import TransferError


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


@dataclass(frozen=True, eq=False)
class _Data:
    """What a read or write moves here."""

    number: int
    """Among the agent's."""
    local: DescriptorList
    indices: Ints32
    is_read: bool


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
        self._faults: list[Fault] = []
        self._num_reads = 0
        self._data: dict[Transfer, _Data] = {}
        self._strikes = Strikes()
        self._own: list[Strike] = []
        """Strikes at this rank that a peer's message sets off."""
        self._held: dict[Transfer, StruckTransfer] = {}
        self._held_ids = itertools.count(-2, -1)
        self._corrupt: dict[Transfer, Strike] = {}
        """Reads that bring something else."""
        self._mail: list[_Mail] = []
        self._peers: list[str] = []
        self._is_wiring = False

    def plant(self, fault: Fault | Strike) -> None:
        """The fault strikes from now on, once. What it counts is counted from here."""
        if isinstance(fault, Strike):
            if fault.is_of_rank and fault.remote == self._engine:
                self._own.append(fault)
            else:
                self._strikes.plant(fault)
            return
        self._num_reads = 0
        self._faults.append(fault)

    def heal(self) -> None:
        """Forget all faults; stalled reads go on."""
        self._faults.clear()

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
        """See TransferAgent."""
        return self._agent.name

    @property
    def transport(self) -> str:
        """See TransferAgent."""
        return self._agent.transport

    def register(self, tensor: torch.Tensor) -> int:
        """See TransferAgent."""
        self._regions.append(tensor)
        return self._agent.register(tensor)

    def deregister(self, address: int) -> None:
        """See TransferAgent."""
        self._regions = [region for region in self._regions if region.data_ptr() != address]
        self._agent.deregister(address)

    def metadata(self) -> bytes:
        """See TransferAgent."""
        return self._agent.metadata()

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See TransferAgent."""
        self._agent.add_peer(name, metadata)
        self._peers = [*(p for p in self._peers if p != name), name]

    def remove_peer(self, name: str) -> None:
        """See TransferAgent."""
        self._peers = [p for p in self._peers if p != name]
        self._agent.remove_peer(name)

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        """See TransferAgent."""
        handle = self._agent.prepare(peer, local, remote, remote_device)
        self._lists[handle] = (local, remote)
        return handle

    def forget(self, handle: Handle) -> None:
        """See TransferAgent."""
        del self._lists[handle]
        self._agent.forget(handle)

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        """See TransferAgent."""
        local, remote = self._lists[handle]
        is_data = local.lengths.tolist() != [GENERATION_BYTES]
        strike = self.passes(*self._points(is_data))
        if strike is not None and strike.kind == "corrupt" and strike.point == "post":
            remote_indices = _of_next_block(remote_indices, remote.num_blocks)
        transfer = self._start(strike, lambda: self._agent.read(handle, local_indices, remote_indices))
        if is_data or transfer in self._corrupt:
            self._data[transfer] = _Data(self._num_reads, local, local_indices, is_read=True)
            self._num_reads += is_data
        return transfer

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        """See TransferAgent."""
        local, _ = self._lists[handle]
        strike = self.passes("post", "mid_transfer")
        if strike is not None and strike.kind == "corrupt":
            # A write's bytes are out of reach once they are under way: other pages' are sent.
            local_indices = _of_next_block(local_indices, local.num_blocks)
        write = functools.partial(self._agent.write, handle, local_indices, remote_indices, notification)
        return self._start(strike, write)

    def poll(self, transfer: Transfer) -> TransferState:
        """See TransferAgent."""
        data = self._data.get(transfer)
        if data is not None and any(
            isinstance(f, StallReads) and f.read <= data.number for f in self._faults
        ):
            return TransferState.PENDING
        held = self._held.get(transfer)
        state = held.poll() if held is not None else self._agent.poll(transfer)
        if state is TransferState.DONE and data is not None:
            for fault in [f for f in self._faults if isinstance(f, FlipBit) and f.read == data.number]:
                self._flip(fault, data)
                self._faults.remove(fault)
            strike = self._corrupt.pop(transfer, None)
            if strike is not None:
                self._flip(FlipBit(byte=strike.seed // 8 % 8, bit=strike.seed % 8), data)
        return state

    def release(self, transfer: Transfer) -> bool:
        """See TransferAgent."""
        stalled = transfer in self._data and self.poll(transfer) is TransferState.PENDING
        if stalled and any(isinstance(f, StallReads) for f in self._faults):
            return False
        held = self._held.get(transfer)
        is_over = self._agent.release(transfer) if held is None else held.release()
        if is_over or held is None:
            self._held.pop(transfer, None)
            self._data.pop(transfer, None)
            self._corrupt.pop(transfer, None)
        return is_over

    def notify(self, peer: str, message: bytes) -> None:
        """See TransferAgent."""
        strike = self.passes(_point_of(message)) if _point_of(message) else None
        if strike is None:
            self._agent.notify(peer, message)
            for mail in [m for m in self._mail if m.is_reordered]:
                self._mail.remove(mail)
                self._agent.notify(mail.peer, mail.message)
        elif strike.kind in ("delay", "reorder") or strike.is_of_rank:
            due_s = time.monotonic() + strike.hold_s
            self._mail.append(_Mail(peer, message, due_s, strike.kind == "reorder"))
        elif strike.kind == "duplicate":
            for _ in range(2):
                self._agent.notify(peer, message)
        elif strike.kind == "corrupt":
            self._agent.notify(peer, b"#" + message[1:])

    def notifications(self) -> list[tuple[str, bytes]]:
        """See TransferAgent."""
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
        """See TransferAgent."""
        self._agent.close()

    def _points(self, is_data: bool) -> tuple[str, ...]:
        if self._is_wiring:
            return ("handshake",)
        return ("post", "mid_transfer") if is_data else ("notify",)

    @property
    def num_struck(self) -> Counter[tuple[str, str]]:
        """Strikes that have hit here, by kind and point."""
        return self._strikes.num_struck

    def passes(self, *points: str) -> Strike | None:
        """The strike at what passes now; a rank that is to die does so here, or is told to."""
        strike = self._strikes.take(*points)
        if strike is not None and strike.is_of_rank:
            if strike.remote is None:
                self._on_strike(strike.kind)
            for peer in self._peers:
                with contextlib.suppress(TransferError):
                    self._agent.notify(peer, StrikeMessage(strike.remote or "").encode())
        return strike

    def _start(self, strike: Strike | None, post: Callable[[], Transfer]) -> Transfer:
        for held in self._held.values():
            held.overtaken |= held.strike.kind == "reorder"
        if strike is None or (strike.kind == "corrupt" and strike.point == "post"):
            return post()
        if strike.kind == "corrupt":
            transfer = post()
            self._corrupt[transfer] = strike
            return transfer
        transfer = Transfer(next(self._held_ids))
        self._held[transfer] = StruckTransfer(strike, post, self._agent.poll, self._agent.release)
        return transfer

    def _flip(self, fault: FlipBit, data: _Data) -> None:
        run, block = divmod(int(data.indices[fault.descriptor]), data.local.num_blocks)
        assert fault.byte < int(data.local.lengths[run]), "the byte lies in the descriptor"
        address = int(data.local.addresses[run]) + block * int(data.local.strides[run]) + fault.byte
        region = next(r for r in self._regions if 0 <= address - r.data_ptr() < r.numel())
        region.view(torch.uint8)[address - region.data_ptr()] ^= 1 << fault.bit


def _of_next_block(indices: Ints32, num_blocks: int) -> Ints32:
    """The same runs of other blocks."""
    run, block = np.divmod(indices, num_blocks)
    moved: Ints32 = (run * num_blocks + (block + 1) % num_blocks).astype(np.int32)
    return moved


POINT_OF_MESSAGE = {"release": "free", "renew": "lease_renewal", "arrived": "notify"}


def _point_of(message: bytes) -> str:
    """The point that a message belongs to; empty for any other."""
    content = unpack(message)
    kind = content[0] if isinstance(content, list) and content else None
    return POINT_OF_MESSAGE.get(kind, "") if isinstance(kind, str) else ""


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
