"""Communication among the ranks of one engine: over threads, shared memory or torch groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Comm(Protocol):
    """Collectives among the ranks of one engine, or of a part of it.

    Every method is called by all ranks in the same order. A wait beyond the group's timeout, or a dead peer,
    raises CommError.
    """

    rank: int
    size: int
    name: str
    """local, threads, shm, gloo, nccl or nccl+symmetric, as recorded in the results."""

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for its peers. It may be set between collectives."""
        ...

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns `tensor`. Bitwise the same on every rank."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order. Shapes must be equal."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Write rank 0's tensor into every rank's, in place; returns `tensor`. Shapes must be equal.

        Rank 0 need not wait for its peers (threads, shm, nccl), but may (gloo).
        """
        ...

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank; peers pass None. An idle rank 0 must send a heartbeat within the
        group's timeout, which applies here too."""
        ...

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Return every rank's payload (lengths may differ) on rank 0, in rank order; None elsewhere."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        """Make the comm of a part of the ranks, numbered as `ranks` lists them.

        Each rank passes its own part, and the parts hold every rank once. A part closes with this comm, and
        takes its timeout.
        """
        ...

    def close(self) -> None:
        """Release memory, sockets and groups, those of parts too. Safe to call twice."""
        ...


def queues_on_device(comm: Comm) -> bool:
    """Tell whether collectives are kernels on the device's stream, which no host waits for."""
    return comm.name.startswith("nccl")


@contextlib.contextmanager
def patient(comm: Comm, timeout_s: float) -> Iterator[None]:
    """Return a context in which a rank waits this long for its peers, which may have much to do."""
    usual_s = comm.timeout_s
    comm.timeout_s = max(usual_s, timeout_s)
    try:
        yield
    finally:
        comm.timeout_s = usual_s
