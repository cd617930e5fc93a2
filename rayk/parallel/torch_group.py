"""Communication through torch.distributed: gloo (CPU, or CUDA by way of the host) or NCCL.

The process groups are made directly on a store of their own instead of the process-wide default group,
because a worker that serves one engine after another forms a new group each time.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.parts import Parts, index_in
from rayk.parallel.proof import Proofs
from rayk.parallel.symmetric import MappedMemory, SymmetricSums, open_sums
from rayk.types.errors import CommError, DeviceError

# Its type stubs leave out most of what is used here.
dist: Any = torch.distributed

_LENGTH = struct.Struct("<q")
_SMALL_BYTES = 4096
"""Messages that fit this, with their length, travel in one broadcast."""
_MAX_BYTES = 1 << 30
"""Limit of a message, since its length is read before it is authenticated."""
WITH_SUMS = "+symmetric"
"""What follows the backend in the name of a comm whose small sums go through mapped memory."""


@contextmanager
def _as_comm_error(operation: str) -> Iterator[None]:
    """Convert torch's RuntimeError (DistError and others) for a dead peer or a timeout."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(operation, str(error).splitlines()[0]) from error


def open_store(address: str, rank: int, size: int, timeout_s: float) -> Any:
    """Open the key-value store at `address` (host:port), served by rank 0. Raises CommError."""
    host, _, port = address.rpartition(":")
    assert host, f"address {address!r} is not host:port"
    assert port.isdigit(), f"address {address!r} is not host:port"
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if rank == 0:
        options["master_listen_fd"] = _listen(host, int(port))
    with _as_comm_error("connect"):
        return dist.TCPStore(host, int(port), size, rank == 0, **options)


def _listen(host: str, port: int) -> int:
    """Open a listening socket's descriptor for the store, which would otherwise listen on all addresses."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            return listener.detach()
    except OSError as error:
        raise CommError("connect", f"rank 0 cannot listen at {host}:{port}: {error}") from error


def _local_address(init_address: str) -> str:
    """This machine's address on the way to rank 0's; its own host name may not resolve."""
    host, _, port = init_address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # A datagram socket: nothing is sent.
        return str(probe.getsockname()[0])


class TorchComm:
    """Comm over gloo or NCCL.

    Bytes always travel through gloo on the CPU. With NCCL, a collective is queued on the current CUDA stream
    and returns at once; NCCL's own watchdog ends a hang after the timeout. With memory that ranks can map,
    small sums go through that (symmetric.py).
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        init_address: str,
        timeout_s: float = 30.0,
        *,
        store: Any = None,
        secret: bytes = b"",
        memory: MappedMemory | None = None,
    ) -> None:
        """Meet the other ranks at `init_address` (host:port of rank 0, or `store` made from it). Bytes from
        anybody who does not know `secret` raise CommError. `why_no_sums` says why `memory` is not used."""
        assert backend in ("gloo", "nccl"), backend
        if backend == "nccl" and not dist.is_nccl_available():
            raise DeviceError("this torch is built without NCCL", mend="use comm: gloo")
        self.rank = rank
        self.size = size
        self.name = backend
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._address = init_address
        self._secret = secret
        self._proofs = Proofs(secret)
        self._parts = Parts()
        self._num_divisions = 0
        self._store = store or open_store(init_address, rank, size, timeout_s)
        self._cpu: Any = self._make_gloo(_local_address(init_address))
        self._tensors: Any = self._make_nccl() if backend == "nccl" else self._cpu
        self._memory = memory
        self.sums: SymmetricSums | None = None
        self.why_no_sums: str | None = None
        if memory is not None:
            self._open_sums(memory)

    @property
    def timeout_s(self) -> float:
        return self._timeout.total_seconds()

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        # NCCL counts from when a collective is queued, so that what is queued before keeps its own.
        for group in {id(g): g for g in (self._cpu, self._tensors) if g is not None}.values():
            group._set_default_timeout(self._timeout)
        self._parts.wait_for(timeout_s)

    def _make_gloo(self, hostname: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        options._timeout = self._timeout
        with _as_comm_error("connect"):
            store = dist.PrefixStore("rayk-gloo", self._store)
            return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _make_nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with _as_comm_error("connect"):
            store = dist.PrefixStore("rayk-nccl", self._store)
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _open_sums(self, memory: MappedMemory) -> None:
        with _as_comm_error("connect"):
            store = dist.PrefixStore("rayk-sums", self._store)
            backends = {"cpu": self._cpu} | ({"cuda": self._tensors} if self._backend == "nccl" else {})
            found = open_sums(memory, self.rank, self.size, store, backends, self.timeout_s)
        self.sums, self.why_no_sums = found
        if self.sums is not None:
            self.name = f"{self._backend}{WITH_SUMS}"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ring adds each element once and passes the sum round, so all ranks get the same bits."""
        group = self._open("all_reduce")
        with _as_comm_error("all_reduce"):
            if self.sums is not None and self.sums.add(tensor):
                return tensor
            if self._goes_by_host(tensor):
                host = tensor.cpu()
                group.allreduce([host]).wait()
                return tensor.copy_(host)
            group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        group = self._open("all_gather")
        with _as_comm_error("all_gather"):
            source = tensor.cpu() if self._goes_by_host(tensor) else tensor.contiguous()
            gathered = [torch.empty_like(source) for _ in range(self.size)]
            group.allgather([gathered], [source]).wait()
        return [part.to(tensor.device) for part in gathered]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        group = self._open("broadcast")
        if not self._goes_by_host(tensor):
            _broadcast(group, tensor, "broadcast")
            return tensor
        host = tensor.cpu()
        _broadcast(group, host, "broadcast")
        return tensor if self.rank == 0 else tensor.copy_(host)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        assert (payload is not None) == (self.rank == 0), "rank 0, and only rank 0, passes a payload"
        self._open("broadcast_bytes")
        self._proofs.begin("broadcast_bytes")
        message = None if payload is None else self._proofs.prove(0, payload)
        received = self._broadcast_message(message)
        return payload if payload is not None else self._proofs.check(0, received)

    def _broadcast_message(self, message: bytes | None) -> bytes:
        head_bytes = _SMALL_BYTES - _LENGTH.size
        first = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
        if message is not None:
            framed = _LENGTH.pack(len(message)) + message[:head_bytes]
            first[: len(framed)] = _tensor_of(framed)
        _broadcast(self._cpu, first, "broadcast_bytes")
        framed = _bytes_of(first)
        total = _checked_length("broadcast_bytes", *_LENGTH.unpack_from(framed))
        received = framed[_LENGTH.size : _LENGTH.size + total]
        if total <= head_bytes:
            return received
        rest = torch.zeros(total - head_bytes, dtype=torch.uint8)
        if message is not None:
            rest.copy_(_tensor_of(message[head_bytes:]))
        _broadcast(self._cpu, rest, "broadcast_bytes")
        return received + _bytes_of(rest)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """All ranks receive all payloads."""
        self._open("gather_bytes")
        self._proofs.begin("gather_bytes")
        message = self._proofs.prove(self.rank, payload)
        lengths = [int(n) for n in self._gather_on_cpu(torch.tensor([len(message)]))]
        padded = torch.zeros(_checked_length("gather_bytes", *lengths), dtype=torch.uint8)
        padded[: len(message)] = _tensor_of(message)
        parts = self._gather_on_cpu(padded)
        if self.rank != 0:
            return None
        messages = [_bytes_of(part)[:length] for part, length in zip(parts, lengths, strict=True)]
        return [self._proofs.check(rank, message) for rank, message in enumerate(messages)]

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        index = index_in(ranks, self.rank, self.size)
        self._num_divisions += 1
        self._open("subgroup")
        if len(ranks) == 1:
            return self._parts.add(LocalComm())
        return self._parts.add(
            TorchComm(
                self._backend,
                index,
                len(ranks),
                self._address,
                self.timeout_s,
                # Parts of one division are apart by a rank, divisions by their number.
                store=dist.PrefixStore(f"part-{self._num_divisions}-{min(ranks)}", self._store),
                secret=self._secret,
                memory=self._memory,
            )
        )

    def close(self) -> None:
        """Drop the groups and their sockets. Peers that wait for this rank get CommError."""
        self._parts.close()
        if self.sums is not None:
            self.sums.close()
            self.sums = None
        # NCCL's teardown waits for peers unless it is aborted.
        if self._tensors is not self._cpu and self._tensors is not None:
            self._tensors.abort()
        self._tensors = self._cpu = None
        self._store = None

    def _open(self, operation: str) -> Any:
        if self._tensors is None:
            raise CommError(operation, f"rank {self.rank} has closed its group")
        return self._tensors

    def _goes_by_host(self, tensor: torch.Tensor) -> bool:
        """Tell whether a device tensor must be copied to the CPU for gloo."""
        return self._tensors is self._cpu and tensor.device.type != "cpu"

    def _gather_on_cpu(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.zeros_like(tensor) for _ in range(self.size)]
        with _as_comm_error("gather_bytes"):
            self._cpu.allgather([gathered], [tensor]).wait()
        return gathered


def _broadcast(group: Any, tensor: torch.Tensor, operation: str) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    with _as_comm_error(operation):
        group.broadcast([tensor], options).wait()


def _checked_length(operation: str, *lengths: int) -> int:
    """Find the longest. Raises CommError for an impossible length."""
    if not all(0 <= length <= _MAX_BYTES for length in lengths):
        raise CommError(operation, f"messages of {', '.join(map(str, lengths))} bytes")
    return max(lengths)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
