"""A comm that measures the time of its tensor collectives."""

from __future__ import annotations

import time

import torch

from rayk.parallel.comm import Comm


class TimedComm:
    """Implements Comm over another one whose calls return when the work is done.

    A rank waits in a collective until the last one comes: the rank that waits least is the slowest.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.name = comm.name
        self.collective_ns = 0
        """Total time in all_reduce and all_gather."""

    @property
    def timeout_s(self) -> float:
        return self._comm.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._comm.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter_ns()
        result = self._comm.all_reduce(tensor)
        self.collective_ns += time.perf_counter_ns() - began
        return result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        began = time.perf_counter_ns()
        result = self._comm.all_gather(tensor)
        self.collective_ns += time.perf_counter_ns() - began
        return result

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Not timed: peers wait here for rank 0's next turn, which is no skew."""
        return self._comm.broadcast_bytes(payload)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        return self._comm.gather_bytes(payload)

    def close(self) -> None:
        self._comm.close()


def timed(comm: Comm) -> Comm:
    """Return the comm, watched where that tells anything: a GPU's collectives end on its stream, not on the
    host."""
    return TimedComm(comm) if comm.size > 1 and comm.name != "nccl" else comm
