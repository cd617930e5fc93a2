"""Communication of one host's ranks through shared memory: flags without locks, no system calls in short
waits.

The memory is an anonymous file that rank 0 hands to its peers over a local socket, so /dev/shm has no entry
and nothing is left if every rank is killed. The sockets stay open: the kernel closes a dead rank's, which
tells the others.

Every collective is made of numbered rounds. In round n a rank writes its slot of parity n % 2, raises its
flag to n, and reads the others' slots once their flags say n. It may write parity n % 2 again in round n + 2,
when all flags say n + 1: a rank that has begun round n + 1 has finished reading round n. x86-64 only: other
ranks see the flag after the slot's content because that machine keeps stores in order.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator, Sequence

import torch

from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.parts import Parts, index_in
from rayk.parallel.reduce import sum_in_rank_order
from rayk.parallel.shm_link import Link, connect
from rayk.types.errors import CommError, DeviceError

SLOT_BYTES = 1 << 20
"""Payload of one rank in one round; longer tensors take several rounds."""
_LINE = 64
"""Bytes between flags, so that two ranks never write one cache line."""
_LENGTH = struct.Struct("<q")
_MAX_CACHED_VIEWS = 64

_OPERATIONS = ("all_reduce", "all_gather", "broadcast_bytes", "gather_bytes", "broadcast")


def why_no_shm() -> str | None:
    """Say why this machine cannot run ShmComm, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"shared-memory comm needs x86-64 Linux, this is {platform.machine()}"
    return None


class ShmComm:
    """Comm among up to a few dozen CPU ranks of one host."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        timeout_s: float = 30.0,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Meet the other ranks at `address`, any string that no other group of the host uses.

        Raises CommError if not all have come within `timeout_s`, DeviceError on other machines.
        """
        reason = why_no_shm()
        if reason is not None:
            raise DeviceError(reason, mend="use comm: gloo")
        assert slot_bytes % _LINE == 0, slot_bytes
        self.rank = rank
        self.size = size
        self.name = "shm"
        self._address = address
        self._timeout_s = timeout_s
        self._parts = Parts()
        self._num_divisions = 0
        self._slot_bytes = slot_bytes
        # One line of flags per rank: [0] the round, [1] and [2] the contents of its slots of each parity.
        num_bytes = size * (_LINE + 2 * slot_bytes)
        self._link: Link | None = connect(rank, size, address, num_bytes, timeout_s)
        self._flags = memoryview(self._link.memory)[: size * _LINE].cast("q")
        self._bytes = torch.frombuffer(self._link.memory, dtype=torch.uint8)
        self._round = 0
        self._views: dict[tuple[torch.dtype, int], tuple[list[torch.Tensor], ...]] = {}

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._parts.wait_for(timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in rank order, in place: every rank adds the same numbers the same way."""
        for piece in self._pieces(tensor):
            slots = self._exchange(0, piece)
            sum_in_rank_order(slots, piece)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        targets = zip(*(self._pieces(t) for t in gathered), strict=True)
        for piece, outs in zip(self._pieces(tensor), targets, strict=True):
            for out, slot in zip(outs, self._exchange(1, piece), strict=True):
                out.copy_(slot)
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0 does not wait for its peers to read."""
        for piece in self._pieces(tensor):
            num_bytes = piece.numel() * piece.element_size()
            self._begin()
            slots = self._slots(piece)
            if self.rank == 0:
                slots[0].copy_(piece)
            self._raise_flag(4, num_bytes)
            if self.rank != 0:
                self._await((0,), 4, num_bytes)
                piece.copy_(slots[0])
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0 does not wait for its peers to read."""
        assert (payload is not None) == (self.rank == 0), "rank 0, and only rank 0, passes a payload"
        if payload is not None:
            for chunk in self._framed(payload):
                self._begin()
                self._write(chunk)
                self._raise_flag(2, 0)
            return payload
        received = bytearray()
        total = None
        while total is None or len(received) < total:
            self._begin()
            self._raise_flag(2, 0)
            self._await((0,), 2, 0)
            total = self._receive(0, received, total)
        return bytes(received)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """All ranks wait for all."""
        received = [bytearray() for _ in range(self.size)]
        totals: list[int | None] = [None] * self.size
        chunks = self._framed(payload)
        everyone = range(self.size)
        while any(t is None or len(r) < t for r, t in zip(received, totals, strict=True)):
            self._begin()
            self._write(next(chunks, b""))
            self._raise_flag(3, 0)
            self._await(everyone, 3, 0)
            for rank in everyone:
                totals[rank] = self._receive(rank, received[rank], totals[rank])
        return [bytes(r) for r in received] if self.rank == 0 else None

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        index = index_in(ranks, self.rank, self.size)
        self._num_divisions += 1
        if len(ranks) == 1:
            return self._parts.add(LocalComm())
        # Parts of one division are apart by a rank, divisions by their number.
        address = f"{self._address}/{self._num_divisions}/{min(ranks)}"
        return self._parts.add(ShmComm(index, len(ranks), address, self.timeout_s, self._slot_bytes))

    def close(self) -> None:
        """Leave the group: peers that wait for this rank get CommError."""
        self._parts.close()
        if self._link is None:
            return
        self._views.clear()
        self._flags.release()
        # The memory is freed with the last tensor that uses it.
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._link.close()
        self._link = None

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Flat views of the tensor that fit a slot; writing them writes the tensor."""
        assert tensor.device.type == "cpu", tensor.device
        assert tensor.is_contiguous(), "collectives take contiguous tensors"
        flat = tensor.view(-1)
        step = self._slot_bytes // flat.element_size()
        for start in range(0, max(1, flat.numel()), step):
            yield flat[start : start + step]

    def _exchange(self, operation: int, piece: torch.Tensor) -> list[torch.Tensor]:
        """One round: publish `piece` and return every rank's, as views valid until the next round."""
        num_bytes = piece.numel() * piece.element_size()
        self._begin()
        slots = self._slots(piece)
        slots[self.rank].copy_(piece)
        self._raise_flag(operation, num_bytes)
        self._await(range(self.size), operation, num_bytes)
        return slots

    def _slots(self, like: torch.Tensor) -> list[torch.Tensor]:
        """View every rank's slot of this round's parity as a flat tensor like `like`."""
        key = (like.dtype, like.numel())
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            num_bytes = like.numel() * like.element_size()
            views = tuple(
                [self._slot(r, parity)[:num_bytes].view(like.dtype) for r in range(self.size)]
                for parity in (0, 1)
            )
            self._views[key] = views
        return views[self._round % 2]

    def _slot(self, rank: int, parity: int) -> torch.Tensor:
        start = self.size * _LINE + (2 * rank + parity) * self._slot_bytes
        return self._bytes[start : start + self._slot_bytes]

    def _framed(self, payload: bytes) -> Iterator[bytes]:
        """Yield the payload after its length, in pieces that fit a slot."""
        framed = _LENGTH.pack(len(payload)) + payload
        for start in range(0, len(framed), self._slot_bytes):
            yield framed[start : start + self._slot_bytes]

    def _write(self, chunk: bytes) -> None:
        if chunk:
            slot = self._slot(self.rank, self._round % 2)
            slot[: len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)

    def _receive(self, rank: int, received: bytearray, total: int | None) -> int:
        """Append this round's part of the payload of `rank`; returns the whole length."""
        slot = memoryview(self._slot(rank, self._round % 2).numpy())
        start = 0
        if total is None:
            (total,) = _LENGTH.unpack_from(slot)
            start = _LENGTH.size
        assert total is not None
        received += slot[start : start + total - len(received)]
        return total

    def _begin(self) -> None:
        """Start the next round once everybody has read the slot of its parity."""
        if self._link is None:
            raise CommError("begin", f"rank {self.rank} has closed its group")
        for rank in range(self.size):
            if self._flags[rank * 8] < self._round:
                self._wait(rank, self._round, "begin")
        self._round += 1

    def _raise_flag(self, operation: int, num_bytes: int) -> None:
        """Publish this rank's slot of the round."""
        base = self.rank * 8
        self._flags[base + 1 + self._round % 2] = operation << 48 | num_bytes
        self._flags[base] = self._round

    def _await(self, ranks: range | tuple[int, ...], operation: int, num_bytes: int) -> None:
        """Wait for the round's slots of `ranks` and check that all are in the same collective."""
        flags, number = self._flags, self._round
        mine = operation << 48 | num_bytes
        for rank in ranks:
            if flags[rank * 8] < number:
                self._wait(rank, number, _OPERATIONS[operation])
            theirs = flags[rank * 8 + 1 + number % 2]
            if theirs != mine:
                raise CommError(
                    _OPERATIONS[operation],
                    f"rank {self.rank} passes {num_bytes} bytes, rank {rank} is in "
                    f"{_OPERATIONS[theirs >> 48]} with {theirs & (1 << 48) - 1} bytes",
                )

    def _wait(self, rank: int, number: int, operation: str) -> None:
        """Wait until rank's flag says `number`. Raises CommError on timeout or if a peer is gone."""
        link = self._link
        assert link is not None
        try:
            link.wait_for(self._flags, rank * 8, number, self._timeout_s)
        except TimeoutError:
            raise CommError(
                operation, f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank}"
            ) from None
        except ConnectionError as error:
            raise CommError(operation, str(error)) from None
