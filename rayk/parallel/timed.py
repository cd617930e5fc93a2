"""A comm that notes how long its sums and gathers of tensors take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rayk.parallel.comm import Comm


class TimedComm:
    """Implements Comm over another one, whose calls return when the work is done.

    A rank waits in a collective until the last one comes: who waits least is who the others wait for.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.name = comm.name
        self.collective_ns = 0
        """Time in all_reduce and all_gather since the start."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the comm's."""
        began = time.perf_counter_ns()
        result = self._comm.all_reduce(tensor)
        self.collective_ns += time.perf_counter_ns() - began
        return result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """As the comm's."""
        began = time.perf_counter_ns()
        result = self._comm.all_gather(tensor)
        self.collective_ns += time.perf_counter_ns() - began
        return result

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """As the comm's; peers wait here for rank 0's next turn, which is no skew."""
        return self._comm.broadcast_bytes(payload)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """As the comm's."""
        return self._comm.gather_bytes(payload)

    def close(self) -> None:
        """As the comm's."""
        self._comm.close()


def timed(comm: Comm) -> Comm:
    """The comm, watched where that tells anything: a GPU's collectives end on its stream, not on the host."""
    return TimedComm(comm) if comm.size > 1 and comm.name != "nccl" else comm
