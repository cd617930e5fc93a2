"""Communication among the ranks of one engine: over threads, shared memory or torch groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch


class Comm(Protocol):
    """Collectives among the tensor-parallel ranks of one engine.

    Every method is called by all ranks in the same order. A wait beyond the group's timeout, or a dead peer,
    raises CommError.
    """

    rank: int
    size: int
    name: str
    """local, threads, shm, gloo or nccl, as recorded in the results."""

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

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank; peers pass None. An idle rank 0 must send a heartbeat within the
        group's timeout, which applies here too."""
        ...

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Return every rank's payload (lengths may differ) on rank 0, in rank order; None elsewhere."""
        ...

    def close(self) -> None:
        """Release memory, sockets and groups. Safe to call twice."""
        ...


@contextlib.contextmanager
def patient(comm: Comm, timeout_s: float) -> Iterator[None]:
    """Return a context in which a rank waits this long for its peers, which may have much to do."""
    usual_s = comm.timeout_s
    comm.timeout_s = max(usual_s, timeout_s)
    try:
        yield
    finally:
        comm.timeout_s = usual_s
