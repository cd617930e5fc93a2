"""How the ranks of one engine talk. Implementations: local, threads, shared memory, torch groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Comm(Protocol):
    """Collectives among the tensor-parallel ranks of one engine.

    Every method is called by all ranks in the same order. A wait that outlasts the group's timeout,
    or a peer that is gone, raises CommError.
    """

    rank: int
    size: int
    name: str
    """local, threads, shm, gloo or nccl: recorded in the results."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns `tensor`. Bitwise the same on every rank."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. Shapes must be equal."""
        ...

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's payload on every rank. Peers pass None.

        Rank 0 of an idle engine sends a heartbeat well inside the group's timeout, so the same
        timeout applies here.
        """
        ...

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """Every rank's payload (lengths may differ) on rank 0, in rank order; None elsewhere."""
        ...

    def close(self) -> None:
        """Release memory, sockets and groups. Safe to call twice."""
        ...
